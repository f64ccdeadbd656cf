// The instances of the sm_90a product (gemm_int8_sm90.cuh). cuda/CMakeLists.txt lists them and
// makes a file of each, and the table below; a build without CUTLASS or without sm_90a has none.
// Tiles of 128 x 128 and 128 x 192 are pingpong: two tiles in turns, the epilogue of one behind the
// products of the other. Both consumer groups share those of 128 x 256, which move the fewest bytes
// for their products. Stream-K divides the contraction where the tiles do not fill the GPU (INT32
// sums: exact in any order).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"
#include "plan/gemm_sm90_plan.h"

namespace hot::detail {

// What happens to the scaled sums.
enum class Sm90Output : std::uint8_t { store, accumulate, bias };

struct Sm90Instance {
  Sm90Kernel kernel;
  DType out;
  Sm90Output output;
  // Both scales are vectors; why_not_wgmma (plan_gemm.cpp) says what else is needed. `workspace`:
  // of stream-K alone.
  void (*run)(const Context&, const GemmArgs&, const Sm90Plan&, void* workspace);
  std::size_t (*workspace)(const Context&, const GemmArgs&, const Sm90Plan&);
};

// Ends with null.
extern const Sm90Instance* const sm90_instances[];

inline bool sm90_built() { return sm90_instances[0] != nullptr; }
const Sm90Instance& sm90_instance(Sm90Kernel, DType out, Sm90Output);

}  // namespace hot::detail
