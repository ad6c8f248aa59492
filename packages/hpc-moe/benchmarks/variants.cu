// Times of fused_moe's kernels without Python; built and run by variants.py, once for each variant.
//
//   program FOLDER save|compare CASE...     CASE: layer:tokens:tensor|block[:mid][:one][:bf16], e.g.
//   hy3-ep8:2048:tensor
//
// `mid` takes the kernels of larger calls for few tokens too; `one`: top_k 1 and all tokens on one expert; `bf16`: x
// comes as bf16.
//
// Prints for each case the time of a call and of its four kernels (CUDA graph replay, cold: the weights exceed L2), and
// how its output differs from the one that the variant run with `save` left in FOLDER.
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "hpc/device.hpp"
#include "launch/call.hpp"

using namespace hpc::moe;
using hpc::cuda_check;

namespace {

struct Shape {
  const char* name;
  int experts, all_experts, drawn, hidden, inter;
};
constexpr Shape kShapes[] = {{"hy3-tp8", 192, 192, 192, 4096, 192},
                             {"hy3-ep8", 24, 24, 24, 4096, 1536},
                             {"hy3-ep8-global", 24, 192, 192, 4096, 1536},
                             {"qwen3-30b", 128, 128, 128, 2048, 768},
                             // For compute-sanitizer.
                             {"small", 16, 16, 16, 512, 192},
                             {"small-128", 16, 16, 16, 512, 256}};
constexpr int kTopK = 8;

__device__ uint32_t mix(uint64_t i) {
  i = (i ^ i >> 33) * 0xff51afd7ed558ccdULL;
  i = (i ^ i >> 33) * 0xc4ceb9fe1a85ec53ULL;
  return static_cast<uint32_t>(i ^ i >> 33);
}

__global__ void fill_bf16(__nv_bfloat16* to, size_t count, uint64_t seed) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count; i += size_t{gridDim.x} * blockDim.x) {
    to[i] = __float2bfloat16(4 * 0x1p-32f * static_cast<float>(mix(i + seed * 7919)) - 2);
  }
}

// Normal values times `size` as e4m3: what power and speed depend on is not to be zeros.
__global__ void fill_e4m3(uint8_t* to, size_t count, uint64_t seed, float size) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count; i += size_t{gridDim.x} * blockDim.x) {
    const uint64_t at = i + seed * 0x9E3779B97F4A7C15ULL;
    const float u = (static_cast<float>(mix(2 * at)) + 1.0f) * 0x1p-32f;
    const float v = __cosf(6.2831853f * 0x1p-32f * static_cast<float>(mix(2 * at + 1)));
    to[i] = __nv_cvt_float_to_fp8(sqrtf(-2.0f * __logf(fminf(u, 0.9999999f))) * v * size, __NV_SATFINITE, __NV_E4M3);
  }
}

__global__ void fill_float(float* to, size_t count, uint64_t seed, float low, float high) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count; i += size_t{gridDim.x} * blockDim.x) {
    to[i] = low + (high - low) * 0x1p-32f * static_cast<float>(mix(i + seed * 7919));
  }
}

// Device memory of a case; freed with it.
class Memory {
 public:
  ~Memory() {
    for (void* each : made_) cudaFree(each);
  }
  template <class T>
  T* make(size_t count) {
    void* pointer = nullptr;
    cuda_check(cudaMalloc(&pointer, count * sizeof(T) + 256), "cudaMalloc");
    made_.push_back(pointer);
    return static_cast<T*>(pointer);
  }
  uint8_t* e4m3(size_t count, uint64_t seed) {
    auto* to = make<uint8_t>(count);
    fill_e4m3<<<1320, 256>>>(to, count, seed, 64.0f);
    return to;
  }
  float* floats(size_t count, uint64_t seed, float low, float high) {
    auto* to = make<float>(count);
    fill_float<<<64, 256>>>(to, count, seed, low, high);
    return to;
  }

 private:
  std::vector<void*> made_;
};

std::vector<int> uniform_ids(const Shape& shape, int tokens, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<int> ids, order(static_cast<size_t>(shape.drawn));
  for (int token = 0; token < tokens; ++token) {
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
    for (size_t k = 0; k < kTopK; ++k) {
      std::swap(order[k], order[k + random() % (order.size() - k)]);
      ids.push_back(order[k]);
    }
  }
  return ids;
}

// Microseconds a call, the median of 7 replays of a graph that makes every call four times.
double time_calls(std::vector<Call> calls, const Config& config, int num_sms, cudaStream_t stream, uint32_t kernels) {
  for (Call& call : calls) call.kernels = kernels;
  for (const Call& call : calls) run(call, config, num_sms, stream);
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  cuda_check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
  for (int i = 0; i < 4; ++i) {
    for (const Call& call : calls) run(call, config, num_sms, stream);
  }
  cuda_check(cudaStreamEndCapture(stream, &graph), "capture");
  cuda_check(cudaGraphInstantiate(&replay, graph, 0), "cudaGraphInstantiate");
  cudaEvent_t start, stop;
  cudaEventCreate(&start);
  cudaEventCreate(&stop);
  std::vector<float> times;
  for (int round = 0; round < 7; ++round) {
    cuda_check(cudaGraphLaunch(replay, stream), "cudaGraphLaunch");
    cudaEventRecord(start, stream);
    cuda_check(cudaGraphLaunch(replay, stream), "cudaGraphLaunch");
    cudaEventRecord(stop, stream);
    cuda_check(cudaEventSynchronize(stop), "replay");
    float ms = 0;
    cudaEventElapsedTime(&ms, start, stop);
    times.push_back(ms * 1000 / (4 * static_cast<float>(calls.size())));
  }
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

float bf16(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

// Saves the output, or says how it differs from the one saved.
std::string verdict(const std::string& path, bool save, const std::vector<uint16_t>& out) {
  const auto bytes = static_cast<std::streamsize>(out.size() * 2);
  if (save) {
    std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(out.data()), bytes);
    return "saved";
  }
  std::vector<uint16_t> saved(out.size());
  std::ifstream in(path, std::ios::binary);
  if (!in.read(reinterpret_cast<char*>(saved.data()), bytes)) return "nothing to compare with";
  if (saved == out) return "same bits";
  double off = 0, size = 0;
  for (size_t i = 0; i < out.size(); ++i) {
    const double apart = bf16(out[i]) - bf16(saved[i]);
    off += apart * apart;
    size += static_cast<double>(bf16(saved[i])) * bf16(saved[i]);
  }
  char text[64];
  std::snprintf(text, sizeof(text), "relative RMS %.5f", std::sqrt(off / size));
  return text;
}

void run_case(const std::string& name, const std::string& folder, bool save) {
  std::string text = name, layer, quant_name;
  std::replace(text.begin(), text.end(), ':', ' ');
  int tokens = 0;
  std::istringstream words(text);
  words >> layer >> tokens >> quant_name;
  bool mid = false, one = false, bf16_x = false;
  for (std::string word; words >> word;) {
    mid |= word == "mid";
    one |= word == "one";
    bf16_x |= word == "bf16";
  }
  const int top_k = one ? 1 : kTopK;
  const auto* shape =
      std::find_if(std::begin(kShapes), std::end(kShapes), [&](const Shape& s) { return s.name == layer; });
  hpc::check(shape != std::end(kShapes) && tokens > 0, "variants", "case", "layer:tokens:tensor or block", name);
  const Quant quant = quant_name == "tensor" ? Quant::kTensor : Quant::kBlock;
  const bool block = quant == Quant::kBlock;
  const auto e = static_cast<size_t>(shape->experts), h = static_cast<size_t>(shape->hidden);
  const auto i = static_cast<size_t>(shape->inter), t = static_cast<size_t>(tokens), b = i % 128 ? size_t{64} : 128;
  const int num_sms = hpc::device_properties(0).num_sms;
  Config config = make_config(
      {tokens, top_k, shape->experts, shape->all_experts, shape->hidden, shape->inter, quant, bf16_x, mid, num_sms});
  if (mid) config.exact = false;  // as in larger calls
  cudaStream_t stream;
  cuda_check(cudaStreamCreate(&stream), "cudaStreamCreate");
  Memory memory;
  Call call{};
  call.quant = quant;
  call.tokens = tokens;
  call.top_k = top_k;
  call.x_is_bf16 = bf16_x;
  call.num_local = shape->experts;
  call.hidden = shape->hidden;
  call.intermediate = shape->inter;
  call.x_stride = shape->hidden;
  call.w13 = memory.e4m3(e * 2 * i * h, 1);
  call.w2 = memory.e4m3(e * h * i, 2);
  call.id_token_stride = call.weight_token_stride = top_k;
  call.id_slot_stride = call.weight_slot_stride = 1;
  const float size = 1 / (64 * std::sqrt(static_cast<float>(shape->hidden)));
  call.w13_scale = memory.floats(block ? e * (2 * i / b) * (h / 128) : e, 3, size / 2, size * 2);
  call.w2_scale = memory.floats(block ? e * (h / 128) * (i / b) : e, 4, 1e-3f, 4e-3f);
  call.x_scale_stride = shape->hidden / 128;
  call.x_scale_step = 1;
  call.act_scale = memory.floats(1, 5, 1 / 64.f, 1 / 64.f);
  call.swiglu_limit = -1.0f;
  call.routed_scaling_factor = 1.0f;
  call.workspace = memory.make<uint8_t>(static_cast<size_t>(config.layout.bytes));
  call.out_stride = shape->hidden;
  std::vector<Call> calls;
  for (unsigned set = 0; set < (tokens <= 256 ? 4 : 2); ++set) {
    const std::vector<int> ids =
        one ? std::vector<int>(t, 3) : uniform_ids(*shape, tokens, static_cast<unsigned>(tokens) * 31 + set);
    auto* device_ids = memory.make<int>(ids.size());
    cuda_check(cudaMemcpy(device_ids, ids.data(), ids.size() * 4, cudaMemcpyHostToDevice), "cudaMemcpy");
    call.topk_ids = device_ids;
    call.topk_weights = memory.floats(t * kTopK, 9 + set, 0.0f, 1.0f);
    if (bf16_x) {
      auto* x = memory.make<__nv_bfloat16>(t * h);
      fill_bf16<<<1320, 256>>>(x, t * h, 20 + set);
      call.x = x;
    } else {
      call.x = memory.e4m3(t * h, 20 + set);
    }
    call.x_scale = memory.floats(block ? t * (h / 128) : 1, 30 + set, 1 / 128.f, 1 / 32.f);
    call.out = memory.make<uint16_t>(t * h);
    calls.push_back(call);
  }
  cuda_check(cudaDeviceSynchronize(), "inputs");
  run(calls[0], config, num_sms, stream);
  std::vector<uint16_t> out(t * h);
  cuda_check(cudaStreamSynchronize(stream), "the call");
  cuda_check(cudaMemcpy(out.data(), calls[0].out, out.size() * 2, cudaMemcpyDeviceToHost), "cudaMemcpy");
  std::string file = name;
  std::replace(file.begin(), file.end(), ':', '_');
  const std::string said = verdict(folder + "/" + file, save, out);
  std::printf("%-28s %8.1f", name.c_str(), time_calls(calls, config, num_sms, stream, ~0u));
  for (uint32_t kernel = 0; kernel < 4 && config.regime != Regime::kLow; ++kernel) {
    std::printf(" %8.1f", time_calls(calls, config, num_sms, stream, 1u << kernel));
  }
  std::printf("  %s\n", said.c_str());
  std::fflush(stdout);
  cudaStreamDestroy(stream);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  try {
    for (int i = 3; i < argc; ++i) run_case(argv[i], argv[1], std::string(argv[2]) == "save");
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 1;
  }
  return 0;
}
