// Emulation of thread blocks on a CPU, for tests of the kernels' arithmetic without a GPU.
//
// Emulated: the kernels' and launchers' own sources, compiled by the host's C++ compiler. A CUDA thread is a fiber of
//   one host thread; fibers change where threads meet (shuffles, votes, mma, __syncwarp, __syncthreads), warps and
//   lanes in a scrambled order. ptx.hpp stands in for the PTX. Clusters run one after the other, kernels too; the
//   blocks of a cluster run side by side.
// Noticed besides wrong results:
//   - lanes of a warp that meet at different instructions, and deadlocks;
//   - shared memory outside what the launch asked for, misaligned accesses and copies;
//   - shared memory read before it was written, and copies read before cp_async_wait and __syncwarp: NaN until then;
//   - races in shared memory: accesses that no barrier orders (races.hpp says which are seen);
//   - a thread that ends without pdl_wait where others of its block wait, a kernel none of whose blocks waits, and what
//     is read or written too early: pdl_wait returns when no thread of the block gets on without it, and memory that a
//     predecessor writes (late) holds NaN before, its contents then.
// Not emulated: time; the memory model (a missing fence, races in global memory, between blocks or kernels); a warp
//   whose lanes run apart; when a wgmma reads and writes, the copy engine; how tensor cores round sums and
//   how coarse the approximate functions are; limits of registers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace emulation {

constexpr int kSharedBytes = 227 * 1024;  // the most dynamic shared memory of a block
constexpr int kMaxThreads = 1024;
constexpr int kMaxWords = 12;

// Number of the planted fault that is on; 0: none. The test's copy of the sources asks for it.
extern int fault;

// The instruction at which a warp's lanes meet.
enum class Meeting { kSync, kShuffle, kVote, kReduce, kMma, kTranspose };

// Runs `body` once for each thread of a cluster of `of` blocks. enter(rank, thread) is called whenever a thread goes
// on. Throws what a thread throws, and std::runtime_error for a deadlock or a thread that ends without pdl_wait, unless
// the whole cluster does.
void run_cluster(int of, int threads, size_t smem_bytes, const std::function<void(int, int)>& enter,
                 const std::function<void()>& body);

// Memory that the predecessors of the next `launches` kernels write.
void late(void* address, size_t bytes, int launches);
void forget_late();
// To be called when a kernel's blocks have run; std::runtime_error where none waited for the predecessor.
void end_launch();

// For the current thread:
int lane();
// Gives `words` words to the warp's other lanes; returns all lanes' as [word][lane], valid until the next exchange.
const uint32_t (*exchange(Meeting meeting, const uint32_t* mine, int words))[32];
void sync_block();
// Named barrier `id` of so many threads; whether `value` was true in any of them.
bool sync_threads(int id, int threads, bool value);
void wait_for_predecessor();

// Shared memory: addresses count from its beginning.
char* shared_memory();
uint32_t shared_address(const void* pointer);
char* shared_pointer(uint32_t address, uint32_t bytes);
// The same for an access of the current thread, which must not race with another's.
const char* read_shared(uint32_t address, uint32_t bytes);
char* write_shared(uint32_t address, uint32_t bytes);
void copy_async(uint32_t shared, const void* global, int size, int bytes);
void commit_copies();
void wait_for_copies(size_t pending);

// mbarriers, and copies that complete on them: what such a copy brings is there when a thread has waited for it.
void init_barrier(uint32_t address, uint32_t count);
void arrive(uint32_t address, uint32_t expected_bytes);
void wait_barrier(uint32_t address, uint32_t parity);
void bulk_copy(uint32_t shared, const void* global, uint32_t bytes, uint32_t address);

// Clusters. A store into another block is performed like a copy: when a thread there has waited for it.
int cluster_rank();
uint32_t cluster_address(uint32_t shared, uint32_t rank);
void cluster_arrive();
void cluster_wait();
void store_async(uint32_t address, uint32_t barrier, const void* data);

}  // namespace emulation
