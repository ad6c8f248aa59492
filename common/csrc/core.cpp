// hpc_common._core: the schedulers, for tests and the demo. Operators use the planners compiled into their own
// extension.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <utility>
#include <vector>

#include "hpc/build_info.hpp"
#include "hpc/schedule_bind.hpp"

void bind_grouped(nanobind::module_& module);  // grouped.cpp

namespace nb = nanobind;

namespace {

void bind_decode(nb::module_& module) {
  hpc::bind_plan_host(module);
  module.def("decode_map_bytes", &hpc::decode_map_bytes, nb::arg("max_batch"), nb::arg("num_ctas"));
  module.def(
      "floor_tiles",
      [](int64_t total_tiles, int32_t num_ctas, int32_t min_tiles) {
        return hpc::floor_tiles(total_tiles, hpc::tiles_share(total_tiles, num_ctas), min_tiles);
      },
      nb::arg("total_tiles"), nb::arg("num_ctas"), nb::arg("min_tiles"));
  module.def("piece_tiles", &hpc::piece_tiles, nb::arg("num_tiles"));
  module.def(
      "partial_slots",
      [](int32_t num_kv_heads, int32_t q_len, int32_t window, int32_t max_seq_len, int32_t num_ctas,
         bool batch_invariant, int32_t max_batch) {
        const hpc::DecodeShape shape =
            hpc::decode_shape(0, num_kv_heads, q_len, window, max_seq_len, num_ctas, batch_invariant, max_batch, 1);
        hpc::check_decode_shape("partial_slots", shape);
        return hpc::partial_slots(shape);
      },
      nb::arg("num_kv_heads"), nb::arg("q_len"), nb::arg("window"), nb::arg("max_seq_len"), nb::arg("num_ctas"),
      nb::arg("batch_invariant"), nb::arg("max_batch"));
  // Every piece of a map as the kernels read it: (cta, request, kv_head, tile_begin, tile_end, slot, whole).
  module.def(
      "map_pieces",
      [](nb::bytes map) {
        hpc::DecodeHeader header;
        hpc::check(map.size() >= sizeof(header), "map_pieces", "map", "a map", map.size());
        std::memcpy(&header, map.data(), sizeof(header));
        hpc::check(static_cast<int64_t>(map.size()) == hpc::decode_map_bytes(header.max_batch, header.num_ctas),
                   "map_pieces", "map", "a map", map.size());
        const auto* bytes = reinterpret_cast<const unsigned char*>(map.data());
        std::vector<hpc::DecodeRequest> requests(header.max_batch + 1);
        std::vector<hpc::DecodeCta> ctas(header.num_ctas);
        std::memcpy(requests.data(), bytes + hpc::requests_offset(), requests.size() * sizeof(requests[0]));
        std::memcpy(ctas.data(), bytes + hpc::ctas_offset(header.max_batch), ctas.size() * sizeof(ctas[0]));
        nb::list pieces;
        for (int32_t c = 0; c < header.num_ctas; ++c) {
          hpc::DecodeCursor cursor = hpc::decode_cursor(c, ctas[c]);
          hpc::DecodePiece p;
          while (hpc::next_piece(cursor, header, requests.data(), &p)) {
            pieces.append(nb::make_tuple(c, p.request, p.kv_head, p.tile_begin, p.tile_end, p.slot, p.whole));
          }
        }
        return pieces;
      },
      nb::arg("map"));
  module.def(
      "static_schedule",
      [](hpc::HostLengths seq_lens, int32_t num_kv_heads, int32_t q_len, int32_t window, int32_t max_seq_len,
         int32_t num_ctas, int32_t splits, int32_t piece_tiles) {
        const auto batch = static_cast<int32_t>(seq_lens.shape(0));
        const hpc::DecodeShape shape = hpc::decode_shape(batch, num_kv_heads, q_len, window, max_seq_len, num_ctas,
                                                         false, batch > 0 ? batch : 1, 1);
        hpc::check_decode_shape("static_schedule", shape);
        hpc::check((splits > 0) != (piece_tiles > 0) && splits >= 0 && piece_tiles >= 0, "static_schedule",
                   "splits, piece_tiles", "one of them positive, the other 0", hpc::text(splits, ", ", piece_tiles));
        hpc::StaticSchedule result = hpc::static_schedule(seq_lens.data(), shape, splits, piece_tiles);
        return nb::make_tuple(std::move(result.loads), result.makespan, result.pieces, result.empty_pieces);
      },
      nb::arg("seq_lens"), nb::arg("num_kv_heads"), nb::arg("q_len"), nb::arg("window"), nb::arg("max_seq_len"),
      nb::arg("num_ctas"), nb::arg("splits"), nb::arg("piece_tiles"));
}

}  // namespace

NB_MODULE(HPC_MODULE_NAME, module) {
  module.doc() = "Schedulers of the hpc operators, on the host.";
  hpc::bind_build_info(module);
  bind_decode(module);
  bind_grouped(module);
}
