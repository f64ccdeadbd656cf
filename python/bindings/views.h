// Conversions from Python's arguments (DLPack arrays or capsules, names, keys) to libhot's types.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <tuple>
#include <vector>

#include "hot/hot.h"

namespace hotpy {

namespace nb = nanobind;

// Array arguments. Dtype and shape are checked; nothing is converted.
using In = nb::ndarray<nb::ro>;
using Out = nb::ndarray<>;
// Seed, offset, stream and address of the counter.
using KeyTuple = std::tuple<std::uint64_t, std::uint64_t, std::uint32_t, std::uint64_t>;

// View of an array. `name` is the argument's name in messages. uint8 becomes i4x2. None becomes a
// view with ndim 0 and no data.
hot::ConstTensorView view(const In& array, const char* name);
hot::TensorView view(const Out& array, const char* name);

// View of a contiguous uint8 vector.
hot::SavedActivation saved_view(const Out& array, const char* name);
hot::ConstSavedActivation saved_view(const In& array, const char* name);

hot::Key key_of(const KeyTuple& key);

hot::Basis parse_basis(std::string_view text);
hot::Side parse_side(std::string_view text);
hot::Granularity parse_granularity(const char* name, std::string_view text);
hot::Rounding parse_rounding(const char* name, std::string_view text);
hot::Isa parse_isa(std::string_view text);

hot::LowRank low_rank(std::string_view basis, int block, int rank, std::vector<int> rows,
                      int grid_h, int grid_w, int prefix_tokens);

// Scratch of one call: the caller's array, if there is one. On the CPU without an array, memory
// that the thread keeps (up to 64 MB), or new memory. Only then `size` is called.
class Scratch {
 public:
  template <class Size>
  Scratch(const hot::Context& context, const Out& array, const Size& size) {
    if (array.is_valid()) {
      const hot::SavedActivation bytes = saved_view(array, "workspace");
      workspace_ = {bytes.data, bytes.bytes};
    } else if (context.device().type == hot::Device::Type::cpu) {
      allocate(size());
    }
  }
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  const hot::Workspace& get() const noexcept { return workspace_; }

 private:
  void allocate(std::size_t bytes);

  void* owned_ = nullptr;
  bool borrowed_ = false;  // uses the thread's memory
  hot::Workspace workspace_{};
};

// Python's hot::Context, cached by device, stream and number of threads.
struct CoreContext {
  hot::Context context;

  CoreContext(int threads, std::string_view isa, int device, std::uintptr_t stream,
              std::uintptr_t openmp, int sm_margin);
};

struct Spec {
  hot::BackwardLinearSpec spec;
};

void bind_ops(nb::module_& module);
void bind_torch_ops(nb::module_& module);

}  // namespace hotpy
