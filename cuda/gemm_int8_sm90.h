// Instances of the sm_90a product (gemm_int8_sm90.cuh). A build without CUTLASS or sm_90a has none.
// * Tiles of 128 x 128 and 128 x 192 are pingpong: two tiles in turns. The epilogue of one overlaps
//   the products of the other.
// * Tiles of 128 x 256 are shared by both consumer groups and move the fewest bytes.
// * Stream-K divides the contraction if tiles do not fill the GPU. INT32 sums are exact.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"
#include "plan/plan.h"

namespace hot::detail {

// Use of the scaled sums.
enum class Sm90Output : std::uint8_t { store, accumulate, bias };

struct Sm90Instance {
  Sm90Kernel kernel;
  DType out;
  Sm90Output output;
  // Both scales must be vectors; see also why_not_wgmma. `workspace` is stream-K's, or the counter
  // of tiles, which is zero before and after.
  void (*run)(const Context&, const GemmArgs&, const Sm90Plan&, void* workspace);
  std::size_t (*workspace)(const Context&, const GemmArgs&, const Sm90Plan&);
};

// Lists of instances, a kernel each. The last of a list has no `run`.
extern const Sm90Instance sm90_pingpong[], sm90_wide_pingpong[], sm90_cooperative[],
    sm90_stream_k[];
// This build's lists, then null.
extern const Sm90Instance* const sm90_lists[];

inline bool sm90_built() { return sm90_lists[0] != nullptr; }
const Sm90Instance& sm90_instance(Sm90Kernel, DType out, Sm90Output);

}  // namespace hot::detail
