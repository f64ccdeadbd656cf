// Conversions from Python's arguments (DLPack arrays or capsules, names, keys) to libhot's types.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
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

// Codes of a weight: INT8, or with `group` INT4, maybe with other bytes behind them.
struct Codes {
  hot::ConstSavedActivation bytes;
  std::int64_t out_features, in_features;
  hot::ForwardLinearSpec spec;
  int group;

  // Bytes of the INT8 codes that INT4 is expanded to.
  std::size_t expanded() const {
    return group == 0 ? 0 : hot::forward_weight_bytes(out_features, in_features, spec) + 16;
  }
  // The INT8 codes; an expanded INT4 weight takes the beginning of `space`.
  hot::ConstQuantizedWeight in_int8(const hot::Context& context, hot::Workspace& space) const {
    std::size_t size = bytes.bytes;
    if (group == 0) {
      return {bytes.data, size, out_features, in_features, hot::forward_weight_format(spec)};
    }
    if (space.bytes < expanded()) {
      throw nb::value_error("workspace: too few bytes for the codes of the weight");
    }
    const hot::WeightInt4Spec full{spec, group};
    size = std::min(size, hot::weight_int4_bytes(out_features, in_features, full));
    void* place = space.data;
    const std::size_t taken = hot::forward_weight_bytes(out_features, in_features, spec);
    std::align(16, taken, place, space.bytes);
    space = {static_cast<char*>(place) + taken, space.bytes - taken};
    return hot::expand_weight_int4(
        context, {bytes.data, size, out_features, in_features, hot::weight_int4_format(full)}, full,
        {place, taken});
  }
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
