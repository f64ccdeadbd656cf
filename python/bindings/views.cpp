#include "views.h"

#include <initializer_list>
#include <new>
#include <string>
#include <utility>

#include "config_fields.h"

namespace hotpy {
namespace {

[[noreturn]] void invalid(const std::string& message) {
  throw hot::Error(hot::ErrorCode::invalid_argument, message);
}

// DLPack's numbers. nanobind's names for them differ between versions.
constexpr int code_int = 0, code_uint = 1, code_float = 2, code_bfloat = 4, code_complex = 5,
              code_bool = 6;
constexpr int device_cpu = 1, device_cuda = 2, device_cuda_host = 3, device_cuda_managed = 13;

std::string dtype_text(nb::dlpack::dtype dtype) {
  const int code = static_cast<int>(dtype.code);
  const std::string bits = std::to_string(dtype.bits);
  switch (code) {
    case code_int:
      return "int" + bits;
    case code_uint:
      return "uint" + bits;
    case code_float:
      return "float" + bits;
    case code_bfloat:
      return "bfloat" + bits;
    case code_complex:
      return "complex" + bits;
    case code_bool:
      return "bool";
    default:
      return "DLPack type " + std::to_string(code) + " of " + bits + " bits";
  }
}

hot::DType dtype_of(nb::dlpack::dtype dtype, const char* name) {
  const int code = static_cast<int>(dtype.code);
  if (dtype.lanes == 1) {
    if (code == code_float && dtype.bits == 32) return hot::DType::f32;
    if (code == code_float && dtype.bits == 16) return hot::DType::f16;
    if (code == code_bfloat && dtype.bits == 16) return hot::DType::bf16;
    if (code == code_int && dtype.bits == 8) return hot::DType::i8;
    if (code == code_int && dtype.bits == 32) return hot::DType::i32;
    if (code == code_uint && dtype.bits == 8) return hot::DType::i4x2;
  }
  invalid(std::string(name) + ": dtype " + dtype_text(dtype) +
          " is not one of float32, float16, bfloat16, int8, int32, uint8 (packed INT4)");
}

hot::Device device_of(int type, int index, const char* name) {
  switch (type) {
    case device_cpu:
    case device_cuda_host:
      return {};
    case device_cuda:
    case device_cuda_managed:
      return {hot::Device::Type::cuda, index};
    default:
      throw hot::Error(hot::ErrorCode::unsupported, std::string(name) + ": DLPack device type " +
                                                        std::to_string(type) +
                                                        " is neither the CPU nor CUDA");
  }
}

template <class View, class Array>
View make_view(const Array& array, const char* name) {
  View out;
  if (!array.is_valid()) return out;
  if (array.ndim() > static_cast<std::size_t>(hot::max_dims)) {
    invalid(std::string(name) + ": " + std::to_string(array.ndim()) +
            " dimensions; expected at most " + std::to_string(hot::max_dims));
  }
  out.data = array.data();
  out.dtype = dtype_of(array.dtype(), name);
  out.device = device_of(array.device_type(), array.device_id(), name);
  out.ndim = static_cast<int>(array.ndim());
  for (int i = 0; i < out.ndim; ++i) {
    const auto axis = static_cast<std::size_t>(i);
    out.shape[i] = static_cast<std::int64_t>(array.shape(axis));
    out.stride[i] = array.stride(axis);
  }
  return out;
}

template <class View>
void check_bytes(const View& view, const char* name) {
  if (view.dtype != hot::DType::i4x2 || view.ndim != 1 ||
      (view.shape[0] > 1 && view.stride[0] != 1)) {
    invalid(std::string(name) + ": expected a contiguous uint8 vector, got " +
            std::to_string(view.ndim) + " dimensions of " +
            (view.dtype == hot::DType::i4x2 ? "uint8" : hot::dtype_name(view.dtype)));
  }
}

template <class E>
E parse(const char* name, std::string_view text, const char* (*text_of)(E),
        std::initializer_list<E> values) {
  std::string known;
  for (const E value : values) {
    if (text == text_of(value)) return value;
    known += (known.empty() ? "'" : ", '") + std::string(text_of(value)) + "'";
  }
  invalid(std::string(name) + ": '" + std::string(text) + "' is not one of " + known);
}

}  // namespace

hot::ConstTensorView view(const In& array, const char* name) {
  return make_view<hot::ConstTensorView>(array, name);
}
hot::TensorView view(const Out& array, const char* name) {
  return make_view<hot::TensorView>(array, name);
}

hot::SavedActivation saved_view(const Out& array, const char* name) {
  const hot::TensorView v = view(array, name);
  check_bytes(v, name);
  return {v.data, static_cast<std::size_t>(v.shape[0])};
}
hot::ConstSavedActivation saved_view(const In& array, const char* name) {
  hot::ConstSavedActivation out;
  if (!array.is_valid()) return out;
  const hot::ConstTensorView v = view(array, name);
  check_bytes(v, name);
  // An empty torch tensor has a null address, but is not an absent argument.
  alignas(16) static constexpr unsigned char nothing[16] = {};
  out.data = v.data != nullptr ? v.data : nothing;
  out.bytes = static_cast<std::size_t>(v.shape[0]);
  return out;
}

hot::Key key_of(const KeyTuple& key) {
  const auto [seed, offset, stream, counter] = key;
  return {seed, offset, stream,
          reinterpret_cast<const std::uint64_t*>(static_cast<std::uintptr_t>(counter))};
}

hot::Basis parse_basis(std::string_view text) {
  return hot::detail::parse_choice<hot::Basis>("basis", text, hot::detail::bases);
}
hot::Side parse_side(std::string_view text) {
  using E = hot::Side;
  return parse<E>("side", text, [](E e) { return e == E::activation ? "activation" : "gradient"; },
                  {E::activation, E::gradient});
}
hot::Granularity parse_granularity(const char* name, std::string_view text) {
  return hot::detail::parse_choice<hot::Granularity>(name, text, hot::detail::granularities);
}
hot::Rounding parse_rounding(const char* name, std::string_view text) {
  return hot::detail::parse_choice<hot::Rounding>(name, text, hot::detail::roundings);
}
hot::Isa parse_isa(std::string_view text) {
  using E = hot::Isa;
  return parse<E>("isa", text, [](E e) { return hot::isa_name(e); },
                  {E::plain, E::avx2, E::avx512, E::amx});
}

hot::LowRank low_rank(std::string_view basis, int block, int rank, std::vector<int> rows,
                      int grid_h, int grid_w, int prefix_tokens) {
  hot::LowRank out;
  out.basis = parse_basis(basis);
  out.block = block;
  out.rank = rank;
  out.rows = std::move(rows);
  out.layout = {grid_h, grid_w, prefix_tokens};
  return out;
}

namespace {

constexpr std::align_val_t scratch_alignment{256};

void* new_scratch(std::size_t bytes) { return ::operator new(bytes, scratch_alignment); }

void free_scratch(void* data) { ::operator delete(data, scratch_alignment); }

// Scratch that a thread keeps between calls. Memory returned to the system would cost a page fault
// per 4 KB at the next call, up to half of a layer's time.
struct KeptScratch {
  static constexpr std::size_t max_bytes = std::size_t{64} << 20;
  void* data = nullptr;
  std::size_t bytes = 0;
  bool lent = false;

  void release() {
    free_scratch(data);
    data = nullptr;
    bytes = 0;
  }
  ~KeptScratch() { release(); }
};
thread_local KeptScratch thread_scratch;

}  // namespace

void Scratch::allocate(std::size_t bytes) {
  if (bytes == 0) return;
  if (thread_scratch.lent || bytes > KeptScratch::max_bytes) {
    owned_ = new_scratch(bytes);
    workspace_ = {owned_, bytes};
    return;
  }
  if (thread_scratch.bytes < bytes) {
    thread_scratch.release();
    thread_scratch.data = new_scratch(bytes);
    thread_scratch.bytes = bytes;
  }
  thread_scratch.lent = borrowed_ = true;
  workspace_ = {thread_scratch.data, bytes};
}

Scratch::~Scratch() {
  free_scratch(owned_);
  if (borrowed_) thread_scratch.lent = false;
}

}  // namespace hotpy
