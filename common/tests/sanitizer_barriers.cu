// What compute-sanitizer makes of named barriers of a block's halves: programs without a race and without divergence.
//
//   nvcc -std=c++20 -gencode arch=compute_90a,code=sm_90a -o barriers sanitizer_barriers.cu
//   compute-sanitizer --tool racecheck ./barriers race ROUNDS ROUNDS [twice]
//   compute-sanitizer --tool synccheck ./barriers one|two [stay]
//
// The kernels are as the operators' are: 256 threads consume, 128 more produce, and these end early (or stay). `race`:
// each half passes a barrier of its own so many times, then stores, passes the consumers' barrier (`twice`) and loads
// what the other half has stored. `one`: the halves come to the consumers' barrier at one place of the code; `two`:
// each at a place of its own, as two instances of a template do.
//
// compute-sanitizer of CUDA 13.0 on an H200: racecheck reports hazards of the store against the load after 1, 0 and 3,
// 2 barriers of the halves, and none after 0, 0 and 1, 1 or with `twice`. synccheck reports "Divergent thread(s) in
// block" for `two`, none for `one`, and with `stay` for both, where the producers come to the last barrier at another
// place. PTX counts warps at a named barrier, wherever they are, so none of these programs is wrong.
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
  float* out;
  cudaMalloc(&out, sizeof(float));
  const auto given = [&](const char* word) {
    for (int i = 1; i < argc; ++i) {
      if (std::strcmp(argv[i], word) == 0) return true;
    }
    return false;
  };
  for (int launch = 0; launch < 8; ++launch) {
    if (given("race")) {
      race<<<4, 384>>>(std::atoi(argv[2]), std::atoi(argv[3]), given("twice"), out);
    } else {
      sync<<<4, 384>>>(given("two"), given("stay"), out);
    }
  }
  std::printf("%s\n", cudaGetErrorString(cudaDeviceSynchronize()));
}
