// What compute-sanitizer makes of named barriers of a block's halves and of mbarriers that a cluster's CTAs arrive at:
// programs without a race and without divergence.
//
//   nvcc -std=c++20 -gencode arch=compute_90a,code=sm_90a -o barriers sanitizer_barriers.cu
//   compute-sanitizer --tool racecheck ./barriers race ROUNDS ROUNDS [twice]
//   compute-sanitizer --tool racecheck ./barriers ring [each] [cluster] [copy]
//   compute-sanitizer --tool synccheck ./barriers one|two [stay]
//
// The kernels are as the operators' are: 256 threads consume, 128 more produce, and these end early (or stay). `race`:
// each half passes a barrier of its own so many times, then stores, passes the consumers' barrier (`twice`) and loads
// what the other half has stored. `one`: the halves come to the consumers' barrier at one place of the code; `two`:
// each at a place of its own, as two instances of a template do. `ring`: a stage of one number a thread, which half of
// the block writes (`copy`: by cp.async) and the other half reads and gives back through an mbarrier, where one lane of
// a warp arrives behind the warp's barrier, or `each`. `cluster`: by cluster addresses at those of both CTAs of a
// cluster, each of which waits for both.
//
// compute-sanitizer of CUDA 13.0 on an H200: racecheck reports hazards of the store against the load after 1, 0 and 3,
// 2 barriers of the halves, and none after 0, 0 and 1, 1 or with `twice`. synccheck reports "Divergent thread(s) in
// block" for `two`, none for `one`, and with `stay` for both, where the producers come to the last barrier at another
// place. PTX counts warps at a named barrier, wherever they are, so none of these programs is wrong. `ring`: hazards of
// the next store against the loads of 31 of 32 lanes, those that let another arrive for them, with `cluster` and
// without; none with `each`, `cluster` and `copy` or not: arrivals by cluster addresses and by cp.async are followed, a
// warp's barrier (__syncwarp) is not.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__global__ void race(int first, int second, bool twice, float* out) {
  __shared__ float values[256];
  if (threadIdx.x >= 256) return;
  const int half = static_cast<int>(threadIdx.x) / 128;
  for (int i = 0; i < (half == 0 ? first : second); ++i) named_barrier(2 + half, 128);
  values[threadIdx.x] = 1.0f;
  named_barrier(1, 256);
  if (twice) named_barrier(1, 256);
  if (values[threadIdx.x ^ 128] != 1.0f) *out = 0.0f;  // the other half's
}

__device__ __forceinline__ uint32_t address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

__device__ __forceinline__ void wait(uint32_t barrier, int parity) {
  uint32_t done = 0;
  while (!done) {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, "
        "p;\n}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__global__ void __cluster_dims__(2) ring(bool each, bool cluster, bool copy, const float* in, float* out) {
  __shared__ float values[128];
  __shared__ uint64_t barriers[2];
  const uint32_t full = address(&barriers[0]), empty = address(&barriers[1]);
  const int thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32;
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 128;" ::"r"(full) : "memory");
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(empty), "r"((each ? 128 : 4) * (cluster ? 2 : 1))
                 : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
  float sum = 0.0f;
  for (int turn = 0; turn < 6; ++turn) {
    if (threadIdx.x >= 128) {
      wait(empty, turn % 2 ^ 1);
      if (copy) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address(values + thread)), "l"(in + thread)
                     : "memory");
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(full) : "memory");
      } else {
        values[thread] = static_cast<float>(turn);
        arrive(full);
      }
    } else {
      wait(full, turn % 2);
      sum += values[thread ^ 1];
      if (!each) __syncwarp();
      for (int rank = 0; rank < (cluster ? 2 : 1); ++rank) {
        if (!each && lane != rank) continue;  // one lane for its warp
        if (cluster) {
          uint32_t there;
          asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(empty), "r"(rank));
          asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
        } else {
          arrive(empty);
        }
      }
    }
  }
  if (sum < 0.0f) *out = sum;
  __syncwarp();
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

template <int kHalf>
__device__ __forceinline__ void exchange(float* values, float* out) {
  values[threadIdx.x] = static_cast<float>(kHalf);
  named_barrier(1, 256);
  if (values[threadIdx.x ^ 128] != static_cast<float>(1 - kHalf)) *out = static_cast<float>(kHalf);
}

__global__ void sync(bool two, bool stay, float* out) {
  __shared__ float values[256];
  __syncthreads();
  if (threadIdx.x >= 256) {
    if (stay) named_barrier(4, 384);
    return;
  }
  const int half = static_cast<int>(threadIdx.x) / 128;
  if (two) {
    if (half == 0) {
      exchange<0>(values, out);
    } else {
      exchange<1>(values, out);
    }
  } else {
    values[threadIdx.x] = static_cast<float>(half);
    named_barrier(1, 256);
    if (values[threadIdx.x ^ 128] != static_cast<float>(1 - half)) *out = 1.0f;
  }
  if (stay) named_barrier(4, 384);
}

int main(int argc, char** argv) {
  float *out, *in;
  cudaMalloc(&out, sizeof(float));
  cudaMalloc(&in, 128 * sizeof(float));
  cudaMemset(in, 0, 128 * sizeof(float));
  const auto given = [&](const char* word) {
    for (int i = 1; i < argc; ++i) {
      if (std::strcmp(argv[i], word) == 0) return true;
    }
    return false;
  };
  for (int launch = 0; launch < 8; ++launch) {
    if (given("race")) {
      race<<<4, 384>>>(std::atoi(argv[2]), std::atoi(argv[3]), given("twice"), out);
    } else if (given("ring")) {
      ring<<<4, 256>>>(given("each"), given("cluster"), given("copy"), in, out);
    } else {
      sync<<<4, 384>>>(given("two"), given("stay"), out);
    }
  }
  std::printf("%s\n", cudaGetErrorString(cudaDeviceSynchronize()));
}
