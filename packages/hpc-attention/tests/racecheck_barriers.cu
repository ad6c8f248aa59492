// Whether racecheck follows a block's barrier behind named barriers of its halves: a program without a race.
//
//   nvcc -std=c++20 -gencode arch=compute_90a,code=sm_90a -o barriers racecheck_barriers.cu
//   compute-sanitizer --tool racecheck ./barriers
//
// compute-sanitizer of CUDA 13.0 on an H200: hazards of the store against the load (128 to 640 a launch) in most
// launches in which a half has passed a barrier of its own; none without such a barrier, and none (of 12 launches, of
// this and like programs) where the block's barrier is passed twice.
#include <cstdio>

template <bool kTwice>
__global__ void halves(int first, int second, float* out) {
  __shared__ float values[256];
  const int half = static_cast<int>(threadIdx.x) / 128;
  for (int i = 0; i < (half == 0 ? first : second); ++i) asm volatile("bar.sync %0, 128;" ::"r"(1 + half) : "memory");
  values[threadIdx.x] = 1.0f;
  __syncthreads();
  if (kTwice) __syncthreads();
  if (values[threadIdx.x ^ 128] != 1.0f) *out = 0.0f;  // the other half's
}

int main() {
  float* out;
  cudaMalloc(&out, sizeof(float));
  const int rounds[][2] = {{0, 0}, {1, 0}, {3, 2}};
  for (const auto& [first, second] : rounds) {
    for (int i = 0; i < 4; ++i) {
      halves<false><<<2, 256>>>(first, second, out);
      halves<true><<<2, 256>>>(first, second, out);
    }
  }
  std::printf("%s\n", cudaGetErrorString(cudaDeviceSynchronize()));
}
