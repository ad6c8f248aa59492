// Decode attention for Python: raw addresses, sizes and strides in, two kernels on the caller's stream out. Metadata
// was checked in Python; what would make a kernel touch memory that is not the caller's is checked here again.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <tuple>

#include "config/plan.hpp"
#include "hpc/checks.hpp"
#include "hpc/device.hpp"
#include "hpc/launch.hpp"
#include "hpc/tensor.hpp"
#include "launch/decode.hpp"

namespace nb = nanobind;

namespace {

using hpc::check;
using hpc::text;
using hpc::attention::DecodeParams;
using hpc::attention::DecodeProblem;
using hpc::attention::KvKind;
using hpc::attention::QueryKind;

constexpr const char* kWhere = "hpc_attention.decode";

// Addresses with strides in elements: (address, stride, ...). Address 0: not given.
using Vector = std::tuple<uint64_t, int64_t>;
using Rows = std::tuple<uint64_t, int64_t, int64_t>;            // token, head
using Cache = std::tuple<uint64_t, int64_t, int64_t, int64_t>;  // page, token, head

hpc::attention::CacheView cache_view(const char* name, const Cache& cache, int element_bytes) {
  const auto [address, page, token, head] = cache;
  const auto units = [&](const char* what, int64_t stride) {
    const int64_t bytes = stride * element_bytes;
    check(bytes >= 0 && bytes % 16 == 0 && bytes / 16 <= UINT32_MAX, kWhere, name,
          text("a ", what, " stride of whole 16 bytes, at most 64 GiB"), text(bytes, " bytes"));
    return static_cast<uint32_t>(bytes / 16);
  };
  const char* data = hpc::pointer<const char>(address);
  hpc::check_aligned16(kWhere, name, data);
  return {data, units("page", page), units("token", token), units("head", head)};
}

DecodeProblem problem_of(int kv, int32_t head_dim, int32_t rows, bool per_token_scale, int32_t stages) {
  check(kv >= 0 && kv <= 2, kWhere, "kv", "0 (bf16), 1 (fp16) or 2 (e4m3)", kv);
  check(head_dim == 64 || head_dim == 128 || head_dim == 256, kWhere, "head_dim", "64, 128 or 256", head_dim);
  check(rows >= 1 && rows <= 128, kWhere, "rows", "1 to 128 (q_len * query heads a KV head)", rows);
  return {static_cast<KvKind>(kv), head_dim, rows, per_token_scale, stages};
}

int decode_ctas_per_sm(int device, int kv, int32_t head_dim, int32_t rows) {
  hpc::require_sm90(kWhere, device);
  const hpc::DeviceGuard guard(device);
  return hpc::attention::decode_ctas_per_sm(problem_of(kv, head_dim, rows, true, 0));
}

// CTAs of a plan for one request of at most max_seq_len tokens: its heads' clusters'. 0: as many as of others.
int decode_cluster_ctas(int device, int kv, int32_t head_dim, int32_t rows, int32_t num_kv_heads, int32_t max_seq_len) {
  using namespace hpc::attention;
  const DecodeProblem problem = problem_of(kv, head_dim, rows, true, 0);
  const int32_t cluster = decode_cluster(head_dim, rows, 1, num_kv_heads, false);
  if (cluster == 1 || max_seq_len > kDecodeClusterTokens) return 0;
  if (!plan_leaves_half(1, num_kv_heads, max_seq_len, min_tiles(head_dim, kv_bytes(problem.kv)))) return 0;
  hpc::require_sm90(kWhere, device);
  const hpc::DeviceGuard guard(device);
  return decode_cluster_fits(device, cluster) ? cluster * num_kv_heads : 0;
}

void decode(int device, uint64_t stream, int kv, int query, int32_t batch, int32_t head_dim, int32_t num_q_heads,
            int32_t num_kv_heads, int32_t page_size, int64_t num_pages, int64_t max_pages, int32_t q_len,
            int32_t window, int32_t num_ctas, int32_t max_batch, bool batch_invariant, int32_t max_seq_len, Rows q,
            Rows q_scale, Cache k_cache, Cache v_cache, Vector page_table, Cache k_scale, bool per_token_scale,
            Vector v_scale, uint64_t sinks, Rows out, Rows lse, uint64_t map, int64_t map_bytes, uint64_t workspace,
            int64_t workspace_bytes, float sm_scale, float v_factor, float softcap, bool early, int32_t stages,
            int32_t combine_ctas, int32_t early_slices) {
  check(num_kv_heads >= 1 && num_q_heads % num_kv_heads == 0, kWhere, "num_q_heads", "a multiple of num_kv_heads",
        num_q_heads);
  check(q_len >= 1 && q_len <= 8, kWhere, "q_len", "1 to 8", q_len);
  check(
      page_size == 1 || (page_size >= 16 && page_size <= 256 && std::has_single_bit(static_cast<uint32_t>(page_size))),
      kWhere, "page_size", "1, 16, 32, 64, 128 or 256", page_size);
  check(query >= 0 && query <= 2, kWhere, "query", "0 (bf16), 1 (fp16) or 2 (e4m3)", query);
  check(kv == 2 || kv == query, kWhere, "query", "the cache's type", query);
  check(num_ctas >= 1 && num_ctas <= hpc::kMaxCtas, kWhere, "num_ctas", "1 to 1024", num_ctas);
  check(batch >= 0 && batch <= max_batch, kWhere, "batch", text("0 to ", max_batch), batch);
  const int32_t group = num_q_heads / num_kv_heads;
  const int32_t rows = q_len * group;
  DecodeProblem problem = problem_of(kv, head_dim, rows, per_token_scale, stages);
  problem.num_kv_heads = num_kv_heads;
  const bool one_page = page_size >= hpc::attention::decode_plain_page(problem.kv);
  const bool scales = std::get<0>(k_scale) != 0 || std::get<0>(v_scale) != 0;  // in memory
  problem.plain = one_page && softcap == 0 && window == 0 && sinks == 0 && !scales && !batch_invariant &&
                  query == (problem.kv == KvKind::kFp16 ? 1 : 0);

  hpc::DecodeShape shape = {};
  shape.num_kv_heads = num_kv_heads;
  shape.q_len = q_len;
  shape.window = window;
  shape.max_seq_len = max_seq_len;
  shape.num_ctas = num_ctas;
  shape.batch_invariant = batch_invariant;
  shape.max_batch = max_batch;
  const int64_t slots = hpc::partial_slots(shape);
  const int64_t needed = slots * hpc::attention::decode_slot_bytes(head_dim, rows);
  check(workspace_bytes >= needed, kWhere, "workspace", text("at least ", needed, " bytes"), workspace_bytes);
  const int64_t map_needed = hpc::decode_map_bytes(max_batch, num_ctas);
  check(map_bytes == map_needed, kWhere, "plan", text("a map of ", map_needed, " bytes"), map_bytes);

  DecodeParams p = {};
  const char* map_data = hpc::pointer<const char>(map);
  p.header = reinterpret_cast<const hpc::DecodeHeader*>(map_data);
  p.requests = reinterpret_cast<const hpc::DecodeRequest*>(map_data + hpc::requests_offset());
  p.ctas = reinterpret_cast<const hpc::DecodeCta*>(map_data + hpc::ctas_offset(max_batch));
  p.splits = reinterpret_cast<const hpc::DecodeSplit*>(map_data + hpc::splits_offset(max_batch, num_ctas));
  p.q = hpc::pointer<const char>(std::get<0>(q));
  p.q_token_stride = std::get<1>(q);
  p.q_head_stride = std::get<2>(q);
  p.q_scale = hpc::pointer<const float>(std::get<0>(q_scale));
  p.q_scale_token_stride = std::get<1>(q_scale);
  p.q_scale_head_stride = std::get<2>(q_scale);
  p.k = cache_view("k_cache", k_cache, hpc::attention::kv_bytes(problem.kv));
  p.v = cache_view("v_cache", v_cache, hpc::attention::kv_bytes(problem.kv));
  p.page_table = hpc::pointer<const int32_t>(std::get<0>(page_table));
  p.page_table_stride = std::get<1>(page_table);
  // Without pages nothing may be read: every length is then cut to 0.
  p.capacity = num_pages > 0 ? static_cast<int32_t>(std::min<int64_t>(max_pages * page_size, hpc::kMaxSeqLen)) : 0;
  p.last_page = static_cast<uint32_t>(std::clamp<int64_t>(num_pages - 1, 0, INT32_MAX));
  p.page_shift = std::countr_zero(static_cast<uint32_t>(page_size));
  p.k_scale = hpc::pointer<const float>(std::get<0>(k_scale));
  p.k_scale_page_stride = std::get<1>(k_scale);
  p.k_scale_token_stride = std::get<2>(k_scale);
  p.k_scale_head_stride = std::get<3>(k_scale);
  p.v_scale = hpc::pointer<const float>(std::get<0>(v_scale));
  p.v_scale_head_stride = std::get<1>(v_scale);
  p.sinks = hpc::pointer<const float>(sinks);
  p.out = hpc::pointer<char>(std::get<0>(out));
  p.out_token_stride = std::get<1>(out);
  p.out_head_stride = std::get<2>(out);
  p.lse = hpc::pointer<float>(std::get<0>(lse));
  p.lse_token_stride = std::get<1>(lse);
  p.lse_head_stride = std::get<2>(lse);
  p.row_tiles = (rows + hpc::attention::kRowTile - 1) / hpc::attention::kRowTile;
  p.partial = hpc::pointer<float4>(workspace);
  p.partial_ml = p.partial + slots * p.row_tiles * 2 * head_dim;
  p.scale = softcap > 0 ? sm_scale : sm_scale * hpc::attention::kLog2e;
  p.v_factor = v_factor;
  p.softcap = softcap;
  p.batch = batch;
  p.num_kv_heads = num_kv_heads;
  p.batch_invariant = batch_invariant;
  p.q_len = q_len;
  p.group = group;
  p.group_inverse = (65535 + group) / group;
  p.rows = rows;
  p.row_groups = hpc::attention::decode_config(problem).row_groups;
  p.window = window;
  p.query = static_cast<QueryKind>(query);
  p.out_fp16 = p.query == QueryKind::kFp16;
  p.per_token_scale = per_token_scale;
  hpc::require_sm90(kWhere, device);
  const hpc::DeviceGuard guard(device);
  const int32_t cluster = hpc::attention::decode_cluster(head_dim, rows, max_batch, num_kv_heads, batch_invariant);
  if (stages == 0 && cluster > 1 && num_ctas == cluster * num_kv_heads &&
      hpc::attention::decode_cluster_fits(device, cluster)) {
    problem.cluster = cluster;
    problem.longest = std::min(max_seq_len, p.capacity);
  }
  // Whether no step has tiles for more than half of the SMs.
  const int32_t least = hpc::attention::min_tiles(head_dim, hpc::attention::kv_bytes(problem.kv));
  const bool few = rows <= hpc::attention::kRowTile && head_dim <= 128 && !batch_invariant &&
                   hpc::attention::plan_leaves_half(max_batch, num_kv_heads, std::min(max_seq_len, p.capacity), least);
  if (stages == 0 && !few && hpc::attention::decode_couples(problem, int64_t{batch} * num_kv_heads, num_ctas) &&
      hpc::attention::decode_cluster_fits(device, hpc::attention::kDecodeCouple)) {
    problem.cluster = hpc::attention::kDecodeCouple;
  }
  const int32_t ring = hpc::attention::decode_config(problem).stages;
  // Behind a cluster nothing else waits for its loads.
  if (early_slices < 0)
    early_slices = problem.cluster > hpc::attention::kDecodeCouple ? ring : hpc::attention::decode_early_slices(ring);
  p.early_slices = early && hpc::pdl_enabled() ? std::min(early_slices, ring) : 0;
  hpc::check_aligned16(kWhere, "q", p.q);
  hpc::check_aligned16(kWhere, "out", p.out);
  hpc::check_aligned16(kWhere, "workspace", p.partial);
  hpc::check_aligned16(kWhere, "plan", map_data);

  if (combine_ctas == 0) {
    // CTAs without work cost time, too: where it is known that there are few units, there are as few CTAs.
    const int32_t row_tiles = hpc::attention::decode_config(problem).row_tiles;
    const int32_t per_sm = problem.cluster == hpc::attention::kDecodeCouple
                               ? 1
                               : hpc::attention::decode_combine_ctas_per_sm(problem.kv, problem.head_dim, row_tiles);
    combine_ctas = few ? hpc::kHalf : per_sm * hpc::device_properties(device).num_sms;
  }
  hpc::attention::launch_decode(problem, p, num_ctas, combine_ctas, hpc::pointer<CUstream_st>(stream));
}

}  // namespace

void bind_decode(nb::module_& module) {
  module.def("decode_ctas_per_sm", &decode_ctas_per_sm, nb::arg("device"), nb::arg("kv"), nb::arg("head_dim"),
             nb::arg("rows"));
  module.def("decode_cluster_ctas", &decode_cluster_ctas, nb::arg("device"), nb::arg("kv"), nb::arg("head_dim"),
             nb::arg("rows"), nb::arg("num_kv_heads"), nb::arg("max_seq_len"));
  module.def("decode", &decode);
}
