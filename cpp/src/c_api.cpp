// The C ABI: reads structs and handles, calls the C++ API, turns exceptions into status codes.
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "checks.h"
#include "config_fields.h"
#include "hot/hot.h"
#include "hot/hot_c.h"

struct hot_context {
  hot::Context context;
};

namespace {

using hot::ConstTensorView;
using hot::TensorView;
using hot::detail::invalid;

// ---- errors ------------------------------------------------------------------------------------

// Text of hot_last_error and its memory, per thread.
thread_local const char* error_text = "";
thread_local std::string error_memory;

hot_status fail(hot_status status, const char* text) noexcept {
  try {
    error_memory = text;
    error_text = error_memory.c_str();
  } catch (...) {
    error_text = "out of memory while storing an error text";
  }
  return status;
}

hot_status status_of(hot::ErrorCode code) noexcept {
  switch (code) {
    case hot::ErrorCode::invalid_argument:
      return HOT_INVALID_ARGUMENT;
    case hot::ErrorCode::unsupported:
      return HOT_UNSUPPORTED;
    case hot::ErrorCode::workspace_too_small:
      return HOT_WORKSPACE_TOO_SMALL;
    case hot::ErrorCode::cuda:
      return HOT_CUDA_ERROR;
  }
  return HOT_INTERNAL_ERROR;
}

template <class Call>
hot_status guarded(const Call& call) noexcept {
  try {
    call();
    return HOT_OK;
  } catch (const hot::Error& error) {
    return fail(status_of(error.code()), error.what());
  } catch (const std::bad_alloc&) {
    return fail(HOT_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception& error) {
    return fail(HOT_INTERNAL_ERROR, error.what());
  } catch (...) {
    return fail(HOT_INTERNAL_ERROR, "an exception of an unknown type");
  }
}

// ---- structs with a size -----------------------------------------------------------------------

// Size of a struct in the first version that had it. It never changes: callers compiled against
// that version lack the members added later.
template <class T>
constexpr std::size_t first_size = 0;
template <>
constexpr std::size_t first_size<hot_tensor> = 96;
template <>
constexpr std::size_t first_size<hot_spec> = 80;
template <>
constexpr std::size_t first_size<hot_saved_layout> = 64;
template <>
constexpr std::size_t first_size<hot_saved> = 80;
template <>
constexpr std::size_t first_size<hot_weight> = 48;
template <>
constexpr std::size_t first_size<hot_input> = 48;
template <>
constexpr std::size_t first_size<hot_gradients> = 40;
template <>
constexpr std::size_t first_size<hot_forward_spec> = 16;

// Upper limit for struct_size, so that `read` does not trust an uninitialised number.
constexpr std::size_t max_struct_size = 1024;

template <class T>
void check_struct(const char* call, const char* name, const T* from) {
  static_assert(first_size<T> != 0 && sizeof(T) >= first_size<T>);
  if (from == nullptr) invalid(call, std::string(name) + " is null");
  if (from->struct_size < first_size<T> || from->struct_size > max_struct_size) {
    invalid(call, std::string(name) + ".struct_size is " + std::to_string(from->struct_size) +
                      "; expected the size of the struct, " + std::to_string(sizeof(T)));
  }
}

// Converts a caller's struct of any version to this version.
template <class T>
T read(const char* call, const char* name, const T* from) {
  check_struct(call, name, from);
  const std::size_t size = from->struct_size;
  const auto* bytes = reinterpret_cast<const char*>(from);
  for (std::size_t i = sizeof(T); i < size; ++i) {
    if (bytes[i] != 0) {
      invalid(call, std::string(name) + ".struct_size is " + std::to_string(size) +
                        " and uses members that libhot " + hot::version() +
                        " does not have; it knows " + std::to_string(sizeof(T)) + " bytes");
    }
  }
  T out{};
  std::memcpy(&out, bytes, size < sizeof(T) ? size : sizeof(T));
  return out;
}

// `read` for structs with a member `reserved`, which must be 0: a later version may use it.
template <class T>
T read_known(const char* call, const char* name, const T* from) {
  const T out = read(call, name, from);
  if (out.reserved != 0) {
    invalid(call,
            std::string(name) + ".reserved is " + std::to_string(out.reserved) + "; expected 0");
  }
  return out;
}

// Fills the members that the caller's struct has. Keeps struct_size.
template <class T>
void write(T* out, T value) noexcept {
  value.struct_size = out->struct_size;
  std::memcpy(out, &value, value.struct_size < sizeof(T) ? value.struct_size : sizeof(T));
}

template <class T>
T& place(const char* call, const char* name, T* out) {
  if (out == nullptr) invalid(call, std::string(name) + " is null");
  return *out;
}

// ---- arguments ---------------------------------------------------------------------------------

template <class E>
E choice(const char* call, const char* name, std::int32_t value, E last) {
  if (value < 0 || value > static_cast<std::int32_t>(last)) {
    invalid(call, std::string(name) + " is " + std::to_string(value) + "; expected 0 to " +
                      std::to_string(static_cast<std::int32_t>(last)));
  }
  return static_cast<E>(value);
}

template <class E>
constexpr bool same(int constant, E value) {
  return constant == static_cast<int>(value);
}
static_assert(same(HOT_F32, hot::DType::f32) && same(HOT_F16, hot::DType::f16) &&
              same(HOT_BF16, hot::DType::bf16) && same(HOT_I8, hot::DType::i8) &&
              same(HOT_I32, hot::DType::i32) && same(HOT_I4X2, hot::DType::i4x2));
static_assert(same(HOT_CPU, hot::Device::Type::cpu) && same(HOT_CUDA, hot::Device::Type::cuda) &&
              HOT_MAX_DIMS == hot::max_dims);
static_assert(same(HOT_ISA_PLAIN, hot::Isa::plain) && same(HOT_ISA_AVX2, hot::Isa::avx2) &&
              same(HOT_ISA_AVX512, hot::Isa::avx512) && same(HOT_ISA_AMX, hot::Isa::amx));
static_assert(same(HOT_SIDE_ACTIVATION, hot::Side::activation) &&
              same(HOT_SIDE_GRADIENT, hot::Side::gradient));

// True if the numbers of a field's choices equal the header's constants, in this order.
template <class E, std::size_t n>
constexpr bool same(const hot::detail::Choice<E> (&choices)[n], const int (&constants)[n]) {
  for (std::size_t i = 0; i < n; ++i) {
    if (choices[i].number != constants[i]) return false;
  }
  return true;
}
static_assert(same(hot::detail::granularities,
                   {HOT_SCALE_TENSOR, HOT_SCALE_TOKEN, HOT_SCALE_CHANNEL}) &&
              same(hot::detail::gx_scales, {HOT_SCALE_TOKEN, HOT_SCALE_TENSOR}));
static_assert(same(hot::detail::roundings, {HOT_STOCHASTIC, HOT_NEAREST, HOT_PSEUDO_STOCHASTIC}));
static_assert(same(hot::detail::bases,
                   {HOT_BASIS_FULL, HOT_BASIS_LOWPASS, HOT_BASIS_SEQUENCY, HOT_BASIS_SKETCH}));
static_assert(same(hot::detail::gw_scales,
                   {HOT_GW_SCALE_CHANNEL, HOT_GW_SCALE_TENSOR, HOT_GW_SCALE_TOKEN}));
static_assert(same(hot::detail::storages, {HOT_STORAGE_INT8, HOT_STORAGE_INT4}));

const hot::Context& context_of(const char* call, const hot_context* context) {
  if (context == nullptr) {
    invalid(call, "context is null; expected one from hot_context_cpu or hot_context_cuda");
  }
  return context->context;
}

TensorView view(const char* call, const char* name, const hot_tensor* from) {
  const hot_tensor t = read(call, name, from);
  const std::string which = name;
  TensorView out;
  out.data = t.data;
  out.dtype = choice(call, (which + ".dtype").c_str(), t.dtype, hot::DType::i4x2);
  out.device.type =
      choice(call, (which + ".device_type").c_str(), t.device_type, hot::Device::Type::cuda);
  out.device.index = t.device_index;
  if (t.ndim < 0 || t.ndim > hot::max_dims) {
    invalid(call, which + ".ndim is " + std::to_string(t.ndim) + "; expected 0 to " +
                      std::to_string(hot::max_dims));
  }
  out.ndim = t.ndim;
  for (int d = 0; d < t.ndim; ++d) {
    out.shape[d] = t.shape[d];
    out.stride[d] = t.stride[d];
  }
  return out;
}

// View of an optional array; empty if it is null.
ConstTensorView optional(const char* call, const char* name, const hot_tensor* from) {
  return from == nullptr ? ConstTensorView{} : ConstTensorView(view(call, name, from));
}

// Reads the spec in the argument `name`.
hot::BackwardLinearSpec spec_of(const char* call, const hot_spec* from, const char* name = "spec") {
  return hot::detail::from_c<hot::BackwardLinearSpec>(call, name, read_known(call, name, from));
}

// Fills the caller's struct with the result of compress_activation.
void write_saved(hot_saved* out, const hot::ConstSavedActivation& s) noexcept {
  write(out, {0, s.data, s.bytes, s.tokens, s.in_features, s.key.seed, s.key.offset, s.key.counter,
              s.key.stream, 0, s.format});
}

hot::ConstSavedActivation saved_of(const char* call, const hot_saved* from) {
  if (from == nullptr) return {};
  const hot_saved s = read_known(call, "saved", from);
  return {s.data,
          s.bytes,
          s.tokens,
          s.in_features,
          {s.key_seed, s.key_offset, s.key_stream, s.key_counter},
          s.format};
}

hot::ForwardLinearSpec spec_of(const char* call, const hot_forward_spec* from) {
  return {read_known(call, "spec", from).hadamard_block};
}

// Fills the caller's struct with a quantised w.
void write_weight(hot_weight* out, const hot::ConstQuantizedWeight& q) noexcept {
  write(out, {0, q.data, q.bytes, q.out_features, q.in_features, q.format});
}

// Reads a quantised w; empty if it is null.
hot::ConstQuantizedWeight weight_of(const char* call, const hot_weight* from) {
  if (from == nullptr) return {};
  const hot_weight w = read(call, "weight", from);
  return {w.data, w.bytes, w.out_features, w.in_features, w.format};
}

hot::ConstQuantizedInput input_of(const char* call, const hot_input* from) {
  const hot_input x = read(call, "x", from);
  return {x.data, x.bytes, x.tokens, x.in_features, x.format};
}

// hot_backward_linear for a plain or a quantised w.
template <class Weight>
void backward(const hot_context* context, const hot_tensor* gy, const Weight& w,
              const hot_saved* saved, const hot_spec* spec, const hot_gradients* gradients,
              const hot::Workspace& workspace) {
  const char* const call = "backward_linear";
  const hot::Context& c = context_of(call, context);
  const hot_gradients g = read_known(call, "out", gradients);
  TensorView gx, gw, gb;
  hot::BackwardOutputs out;
  const auto wanted = [&](const char* name, const hot_tensor* from, TensorView& to) {
    if (from == nullptr) return static_cast<const TensorView*>(nullptr);
    to = view(call, name, from);
    return static_cast<const TensorView*>(&to);
  };
  out.gx = wanted("gx", g.gx, gx);
  out.gw = wanted("gw", g.gw, gw);
  out.gb = wanted("gb", g.gb, gb);
  out.accumulate = g.accumulate != 0;
  hot::backward_linear(c, view(call, "gy", gy), w, saved_of(call, saved), spec_of(call, spec), out,
                       workspace);
}

// Runs a function that returns a number and writes it to `out`.
template <class T, class Ask>
hot_status write_result(const char* call, const char* name, T* out, const Ask& ask) noexcept {
  return guarded([&] { place(call, name, out) = ask(); });
}

// hot_forward_linear for plain or quantised x and w.
template <class Input, class Weight>
void forward(const hot_context* context, const Input& x, const Weight& w, const hot_tensor* bias,
             const hot_forward_spec* spec, const hot_tensor* y, const hot::Workspace& workspace) {
  const char* const call = "forward_linear";
  hot::forward_linear(context_of(call, context), x, w, optional(call, "bias", bias),
                      spec_of(call, spec), view(call, "y", y), workspace);
}

// Workspace of hot_forward_linear.
hot_status forward_workspace(const hot_context* context, const hot::LinearShape& shape,
                             const hot_forward_spec* spec, bool quantized_weight,
                             bool quantized_input, std::size_t* bytes) noexcept {
  const char* const call = "forward_linear_workspace";
  return write_result(call, "bytes", bytes, [&] {
    return hot::forward_linear_workspace(context_of(call, context), shape, spec_of(call, spec),
                                         quantized_weight, quantized_input);
  });
}

void check_supported(const hot::Support& support) {
  if (!support.ok) throw hot::Error(hot::ErrorCode::unsupported, support.why);
}

const std::vector<std::string>& known_recipes() {
  static const std::vector<std::string> names = hot::recipe_names();
  return names;
}

template <class Make>
hot_status make_context(const char* call, hot_context** out, const Make& make) noexcept {
  return guarded([&] {
    hot_context*& target = place(call, "out", out);
    target = new hot_context{make()};
  });
}

template <class Change>
hot_status change_context(const char* call, hot_context* context, const Change& change) noexcept {
  return guarded([&] {
    const hot::Context changed = change(context_of(call, context));
    context->context = changed;
  });
}

}  // namespace

extern "C" {

// ---- errors and the build ----------------------------------------------------------------------

const char* hot_status_name(hot_status status) {
  static constexpr const char* names[] = {
      "ok",         "invalid_argument", "unsupported",   "workspace_too_small",
      "cuda_error", "out_of_memory",    "internal_error"};
  return status < HOT_OK || status > HOT_INTERNAL_ERROR ? "unknown" : names[status];
}

const char* hot_last_error(void) { return error_text; }

const char* hot_version(void) { return hot::version(); }

int32_t hot_built_with_cuda(void) { return hot::built_with_cuda() ? 1 : 0; }

const char* hot_cuda_architectures(void) { return hot::cuda_architectures(); }

size_t hot_dtype_size(int32_t dtype) {
  const bool known = dtype >= HOT_F32 && dtype <= HOT_I4X2;
  return known ? hot::dtype_size(static_cast<hot::DType>(dtype)) : 0;
}

// ---- contexts ----------------------------------------------------------------------------------

hot_status hot_context_cpu(int32_t threads, hot_context** out) {
  return make_context("context_cpu", out, [&] { return hot::Context::cpu(threads); });
}

hot_status hot_context_cpu_on(hot_run run, void* state, int32_t threads, hot_context** out) {
  return make_context("context_cpu_on", out,
                      [&] { return hot::Context::cpu(hot::Executor{run, state}, threads); });
}

hot_status hot_context_cuda(int32_t device, void* stream, hot_context** out) {
  return make_context("context_cuda", out,
                      [&] { return hot::Context::cuda(device, static_cast<hot::Stream>(stream)); });
}

hot_status hot_context_copy(const hot_context* context, hot_context** out) {
  return make_context("context_copy", out, [&] { return context_of("context_copy", context); });
}

void hot_context_destroy(hot_context* context) { delete context; }

hot_status hot_context_set_key(hot_context* context, uint64_t seed, uint64_t offset,
                               uint32_t stream, const uint64_t* counter) {
  return change_context("context_set_key", context, [&](const hot::Context& c) {
    return c.with_key({seed, offset, stream, counter});
  });
}

int32_t hot_best_isa(void) { return static_cast<std::int32_t>(hot::best_isa()); }

hot_status hot_context_set_isa(hot_context* context, int32_t isa) {
  const char* const call = "context_set_isa";
  return change_context(call, context, [&](const hot::Context& c) {
    return c.with_isa(choice(call, "isa", isa, hot::Isa::amx));
  });
}

hot_status hot_context_set_arch(hot_context* context, int32_t arch) {
  return change_context("context_set_arch", context,
                        [&](const hot::Context& c) { return c.with_arch(arch); });
}

int32_t hot_context_threads(const hot_context* context) {
  return context == nullptr ? 0 : context->context.threads();
}

// ---- specs and recipes -------------------------------------------------------------------------

hot_status hot_spec_recipe(const char* name, hot_spec* spec) {
  const char* const call = "recipe";
  return guarded([&] {
    place(call, "name", name);
    check_struct(call, "spec", spec);
    hot_spec out{};
    hot::detail::to_c(hot::recipe(name), out);
    write(spec, out);
  });
}

const char* hot_spec_field(int32_t index) {
  const char* name = nullptr;
  std::int32_t at = 0;
  hot::detail::for_each_field(hot::detail::FieldsOf<hot::BackwardLinearSpec>{},
                              [&](const auto& field) {
                                if (at++ == index) name = field.name;
                              });
  return name;
}

hot_status hot_spec_get(const hot_spec* spec, const char* field, char* text, size_t bytes) {
  const char* const call = "spec_get";
  return guarded([&] {
    const hot::BackwardLinearSpec current = spec_of(call, spec);
    place(call, "field", field);
    place(call, "text", text);
    hot::detail::with_field<hot::BackwardLinearSpec>(field, [&](const auto& row) {
      const std::string value = hot::detail::field_text(row, row.get(current));
      if (value.size() >= bytes) {
        invalid(call, "text holds " + std::to_string(bytes) + " bytes; " + row.name + " needs " +
                          std::to_string(value.size() + 1));
      }
      std::memcpy(text, value.c_str(), value.size() + 1);
    });
  });
}

hot_status hot_spec_set(hot_spec* spec, const char* field, const char* text) {
  const char* const call = "spec_set";
  return guarded([&] {
    hot::BackwardLinearSpec changed = spec_of(call, spec);
    place(call, "field", field);
    place(call, "text", text);
    hot::detail::with_field<hot::BackwardLinearSpec>(field, [&](const auto& row) {
      using T = typename std::decay_t<decltype(row)>::Value;
      if constexpr (std::is_same_v<T, std::vector<int>>) {
        invalid(call,
                std::string(row.name) + " is the caller's array; set spec.rows and row_count");
      } else {
        hot::detail::set_field_text(row, text, row.get(changed));
      }
    });
    hot_spec out = read(call, "spec", spec);
    hot::detail::to_c(changed, out);
    write(spec, out);
  });
}

const char* hot_recipe_name(int32_t index) {
  try {
    const std::vector<std::string>& names = known_recipes();
    const bool known = index >= 0 && static_cast<std::size_t>(index) < names.size();
    return known ? names[static_cast<std::size_t>(index)].c_str() : nullptr;
  } catch (...) {  // no memory for the names
    return nullptr;
  }
}

hot_status hot_supported(const hot_context* context, int64_t tokens, int64_t out_features,
                         int64_t in_features, const hot_spec* spec) {
  const char* const call = "supported";
  return guarded([&] {
    check_supported(hot::supported(context_of(call, context), {tokens, out_features, in_features},
                                   spec_of(call, spec)));
  });
}

// ---- single stages -----------------------------------------------------------------------------

hot_status hot_fwht(const hot_context* context, const hot_tensor* x, int32_t axis, int32_t block,
                    const hot_tensor* out) {
  const char* const call = "fwht";
  return guarded([&] {
    hot::fwht(context_of(call, context), view(call, "x", x), axis, block, view(call, "out", out));
  });
}

hot_status hot_basis_order(int32_t basis, int32_t block, int32_t* rows) {
  const char* const call = "basis_order";
  return guarded([&] {
    const std::vector<int> order =
        hot::basis_order(choice(call, "basis", basis, hot::Basis::sketch), block);
    std::int32_t* const to = &place(call, "rows", rows);
    for (std::size_t i = 0; i < order.size(); ++i) to[i] = order[i];
  });
}

hot_status hot_hla_rows(int64_t tokens, const hot_spec* spec, int64_t* rows) {
  const char* const call = "hla_rows";
  return write_result(call, "rows", rows,
                      [&] { return hot::hla_rows(tokens, spec_of(call, spec).low_rank); });
}

hot_status hot_hla(const hot_context* context, const hot_tensor* x, const hot_spec* spec,
                   int32_t side, const hot_tensor* out) {
  const char* const call = "hla";
  return guarded([&] {
    hot::hla(context_of(call, context), view(call, "x", x), spec_of(call, spec).low_rank,
             choice(call, "side", side, hot::Side::gradient), view(call, "out", out));
  });
}

hot_status hot_quantize(const hot_context* context, const hot_tensor* x, int32_t bits,
                        int32_t granularity, int32_t rounding, const hot_tensor* q,
                        const hot_tensor* scale) {
  const char* const call = "quantize";
  return guarded([&] {
    const hot::QuantSpec spec{bits,
                              choice(call, "granularity", granularity, hot::Granularity::channel),
                              choice(call, "rounding", rounding, hot::Rounding::pseudo_stochastic)};
    hot::quantize(context_of(call, context), view(call, "x", x), spec, view(call, "q", q),
                  view(call, "scale", scale));
  });
}

hot_status hot_dequantize(const hot_context* context, const hot_tensor* q, const hot_tensor* scale,
                          int32_t granularity, const hot_tensor* out) {
  const char* const call = "dequantize";
  return guarded([&] {
    hot::dequantize(context_of(call, context), view(call, "q", q), view(call, "scale", scale),
                    choice(call, "granularity", granularity, hot::Granularity::channel),
                    view(call, "out", out));
  });
}

hot_status hot_pack_int4(const hot_context* context, const hot_tensor* q, const hot_tensor* out) {
  const char* const call = "pack_int4";
  return guarded([&] {
    hot::pack_int4(context_of(call, context), view(call, "q", q), view(call, "out", out));
  });
}

hot_status hot_unpack_int4(const hot_context* context, const hot_tensor* packed,
                           const hot_tensor* out) {
  const char* const call = "unpack_int4";
  return guarded([&] {
    hot::unpack_int4(context_of(call, context), view(call, "packed", packed),
                     view(call, "out", out));
  });
}

hot_status hot_gemm_workspace(const hot_context* context, int64_t m, int64_t n, int64_t k,
                              size_t* bytes) {
  const char* const call = "gemm_workspace";
  return write_result(call, "bytes", bytes,
                      [&] { return hot::gemm_workspace(context_of(call, context), m, n, k); });
}

hot_status hot_gemm_int8(const hot_context* context, const hot_tensor* a, const hot_tensor* b,
                         const hot_tensor* a_scale, const hot_tensor* b_scale, int32_t divisor,
                         int32_t accumulate, const hot_tensor* out, void* workspace,
                         size_t workspace_bytes) {
  const char* const call = "gemm_int8";
  return guarded([&] {
    hot::gemm_int8(context_of(call, context), view(call, "a", a), view(call, "b", b),
                   optional(call, "a_scale", a_scale), optional(call, "b_scale", b_scale),
                   {divisor, accumulate != 0}, view(call, "out", out),
                   {workspace, workspace_bytes});
  });
}

hot_status hot_gemm_int4(const hot_context* context, const hot_tensor* a, const hot_tensor* b,
                         int64_t k, const hot_tensor* a_scale, const hot_tensor* b_scale,
                         int32_t divisor, int32_t accumulate, const hot_tensor* out,
                         void* workspace, size_t workspace_bytes) {
  const char* const call = "gemm_int4";
  return guarded([&] {
    hot::gemm_int4(context_of(call, context), view(call, "a", a), view(call, "b", b), k,
                   optional(call, "a_scale", a_scale), optional(call, "b_scale", b_scale),
                   {divisor, accumulate != 0}, view(call, "out", out),
                   {workspace, workspace_bytes});
  });
}

// ---- a linear layer ----------------------------------------------------------------------------

hot_status hot_saved_layout_of(int64_t tokens, int64_t in_features, const hot_spec* spec,
                               hot_saved_layout* layout) {
  const char* const call = "saved_layout";
  return guarded([&] {
    check_struct(call, "layout", layout);
    const hot::SavedLayout l = hot::saved_layout(tokens, in_features, spec_of(call, spec));
    write(layout, {0, l.bytes, l.channels, l.k, l.k_padded, l.row_bytes, l.scales, l.scale_offset,
                   l.exponent_offset});
  });
}

hot_status hot_compress_activation_workspace(const hot_context* context, int64_t tokens,
                                             int64_t in_features, const hot_spec* spec,
                                             size_t* bytes) {
  const char* const call = "compress_activation_workspace";
  return write_result(call, "bytes", bytes, [&] {
    return hot::compress_activation_workspace(context_of(call, context), tokens, in_features,
                                              spec_of(call, spec));
  });
}

hot_status hot_compress_activation(const hot_context* context, const hot_tensor* x,
                                   const hot_spec* spec, void* data, size_t bytes, void* workspace,
                                   size_t workspace_bytes, hot_saved* saved) {
  const char* const call = "compress_activation";
  return guarded([&] {
    check_struct(call, "saved", saved);
    const hot::ConstSavedActivation s =
        hot::compress_activation(context_of(call, context), view(call, "x", x), spec_of(call, spec),
                                 {data, bytes}, {workspace, workspace_bytes});
    write_saved(saved, s);
  });
}

hot_status hot_decompress_activation(const hot_context* context, const hot_saved* saved,
                                     int64_t first, int64_t last, const hot_spec* spec,
                                     const hot_tensor* out) {
  const char* const call = "decompress_activation";
  return guarded([&] {
    check_struct(call, "saved", saved);
    hot::decompress_activation(context_of(call, context), saved_of(call, saved), first, last,
                               spec_of(call, spec), view(call, "out", out));
  });
}

hot_status hot_quantized_weight_bytes(int64_t out_features, int64_t in_features,
                                      const hot_spec* spec, size_t* bytes) {
  const char* const call = "quantized_weight_bytes";
  return write_result(call, "bytes", bytes, [&] {
    return hot::quantized_weight_bytes(out_features, in_features, spec_of(call, spec));
  });
}

hot_status hot_quantize_weight_workspace(const hot_context* context, int64_t out_features,
                                         int64_t in_features, const hot_spec* spec, size_t* bytes) {
  const char* const call = "quantize_weight_workspace";
  return write_result(call, "bytes", bytes, [&] {
    return hot::quantize_weight_workspace(context_of(call, context), out_features, in_features,
                                          spec_of(call, spec));
  });
}

hot_status hot_quantize_weight(const hot_context* context, const hot_tensor* w,
                               const hot_spec* spec, void* data, size_t bytes, void* workspace,
                               size_t workspace_bytes, hot_weight* weight) {
  const char* const call = "quantize_weight";
  return guarded([&] {
    check_struct(call, "weight", weight);
    const hot::ConstQuantizedWeight q =
        hot::quantize_weight(context_of(call, context), view(call, "w", w), spec_of(call, spec),
                             {data, bytes}, {workspace, workspace_bytes});
    write(weight, {0, q.data, q.bytes, q.out_features, q.in_features, q.format});
  });
}

hot_status hot_backward_linear_workspace(const hot_context* context, int64_t tokens,
                                         int64_t out_features, int64_t in_features,
                                         const hot_spec* spec, int32_t need_gx, int32_t need_gw,
                                         size_t* bytes) {
  const char* const call = "backward_linear_workspace";
  return write_result(call, "bytes", bytes, [&] {
    return hot::backward_linear_workspace(context_of(call, context),
                                          {tokens, out_features, in_features}, spec_of(call, spec),
                                          need_gx != 0, need_gw != 0);
  });
}

hot_status hot_backward_linear(const hot_context* context, const hot_tensor* gy,
                               const hot_tensor* w, const hot_saved* saved, const hot_spec* spec,
                               const hot_gradients* out, void* workspace, size_t workspace_bytes) {
  return guarded([&] {
    backward(context, gy, optional("backward_linear", "w", w), saved, spec, out,
             {workspace, workspace_bytes});
  });
}

hot_status hot_backward_linear_quantized(const hot_context* context, const hot_tensor* gy,
                                         const hot_weight* weight, const hot_saved* saved,
                                         const hot_spec* spec, const hot_gradients* out,
                                         void* workspace, size_t workspace_bytes) {
  return guarded([&] {
    backward(context, gy, weight_of("backward_linear", weight), saved, spec, out,
             {workspace, workspace_bytes});
  });
}

hot_status hot_forward_supported(const hot_context* context, int64_t tokens, int64_t out_features,
                                 int64_t in_features, const hot_forward_spec* spec) {
  const char* const call = "forward_supported";
  return guarded([&] {
    check_supported(hot::forward_supported(
        context_of(call, context), {tokens, out_features, in_features}, spec_of(call, spec)));
  });
}

hot_status hot_forward_weight_bytes(int64_t out_features, int64_t in_features,
                                    const hot_forward_spec* spec, size_t* bytes) {
  const char* const call = "forward_weight_bytes";
  return write_result(call, "bytes", bytes, [&] {
    return hot::forward_weight_bytes(out_features, in_features, spec_of(call, spec));
  });
}

hot_status hot_quantize_forward_weight(const hot_context* context, const hot_tensor* w,
                                       const hot_forward_spec* spec, void* data, size_t bytes,
                                       hot_weight* weight) {
  const char* const call = "quantize_forward_weight";
  return guarded([&] {
    check_struct(call, "weight", weight);
    write_weight(weight, hot::quantize_forward_weight(context_of(call, context), view(call, "w", w),
                                                      spec_of(call, spec), {data, bytes}));
  });
}

hot_status hot_forward_linear_workspace(const hot_context* context, int64_t tokens,
                                        int64_t out_features, int64_t in_features,
                                        const hot_forward_spec* spec, int32_t quantized_weight,
                                        size_t* bytes) {
  return forward_workspace(context, {tokens, out_features, in_features}, spec,
                           quantized_weight != 0, false, bytes);
}

hot_status hot_forward_linear(const hot_context* context, const hot_tensor* x, const hot_tensor* w,
                              const hot_tensor* bias, const hot_forward_spec* spec,
                              const hot_tensor* y, void* workspace, size_t workspace_bytes) {
  const char* const call = "forward_linear";
  return guarded([&] {
    forward(context, ConstTensorView(view(call, "x", x)), ConstTensorView(view(call, "w", w)), bias,
            spec, y, {workspace, workspace_bytes});
  });
}

hot_status hot_forward_linear_quantized(const hot_context* context, const hot_tensor* x,
                                        const hot_weight* weight, const hot_tensor* bias,
                                        const hot_forward_spec* spec, const hot_tensor* y,
                                        void* workspace, size_t workspace_bytes) {
  const char* const call = "forward_linear";
  return guarded([&] {
    check_struct(call, "weight", weight);
    forward(context, ConstTensorView(view(call, "x", x)), weight_of(call, weight), bias, spec, y,
            {workspace, workspace_bytes});
  });
}

hot_status hot_forward_input_bytes(int64_t tokens, int64_t in_features,
                                   const hot_forward_spec* spec, size_t* bytes) {
  const char* const call = "forward_input_bytes";
  return write_result(call, "bytes", bytes, [&] {
    return hot::forward_input_bytes(tokens, in_features, spec_of(call, spec));
  });
}

hot_status hot_quantize_forward_input(const hot_context* context, const hot_tensor* x,
                                      const hot_forward_spec* spec, void* data, size_t bytes,
                                      hot_input* input, const hot_spec* kept, void* saved_data,
                                      size_t saved_bytes, void* workspace, size_t workspace_bytes,
                                      hot_saved* saved) {
  return hot_quantize_forward_input_scaled(context, x, nullptr, spec, data, bytes, input, kept,
                                           saved_data, saved_bytes, workspace, workspace_bytes,
                                           saved);
}

hot_status hot_quantize_forward_input_scaled(const hot_context* context, const hot_tensor* x,
                                             const hot_tensor* exponents,
                                             const hot_forward_spec* spec, void* data, size_t bytes,
                                             hot_input* input, const hot_spec* kept,
                                             void* saved_data, size_t saved_bytes, void* workspace,
                                             size_t workspace_bytes, hot_saved* saved) {
  const char* const call = "quantize_forward_input";
  return guarded([&] {
    check_struct(call, "input", input);
    const auto fill = [&](const hot::ConstQuantizedInput& q) {
      write(input, {0, q.data, q.bytes, q.tokens, q.in_features, q.format});
    };
    const hot::Context& c = context_of(call, context);
    const ConstTensorView from = view(call, "x", x);
    const ConstTensorView powers = optional(call, "exponents", exponents);
    const hot::ForwardLinearSpec forward_spec = spec_of(call, spec);
    if (kept == nullptr) {
      fill(hot::quantize_forward_input(c, from, forward_spec, {data, bytes}, powers));
      return;
    }
    check_struct(call, "saved", saved);
    const hot::ForwardInput result = hot::quantize_forward_input(
        c, from, forward_spec, {data, bytes}, spec_of(call, kept, "kept"),
        {saved_data, saved_bytes}, {workspace, workspace_bytes}, powers);
    fill(result.quantized);
    write_saved(saved, result.saved);
  });
}

hot_status hot_forward_linear_input_workspace(const hot_context* context, int64_t tokens,
                                              int64_t out_features, int64_t in_features,
                                              const hot_forward_spec* spec,
                                              int32_t quantized_weight, size_t* bytes) {
  return forward_workspace(context, {tokens, out_features, in_features}, spec,
                           quantized_weight != 0, true, bytes);
}

hot_status hot_forward_linear_input(const hot_context* context, const hot_input* x,
                                    const hot_tensor* w, const hot_weight* weight,
                                    const hot_tensor* bias, const hot_forward_spec* spec,
                                    const hot_tensor* y, void* workspace, size_t workspace_bytes) {
  const char* const call = "forward_linear";
  return guarded([&] {
    if ((w == nullptr) == (weight == nullptr)) {
      invalid(call, std::string("w and weight are both ") + (w == nullptr ? "null" : "given") +
                        "; expected one of them");
    }
    const hot::ConstQuantizedInput from = input_of(call, x);
    const hot::Workspace scratch{workspace, workspace_bytes};
    if (weight != nullptr) {
      forward(context, from, weight_of(call, weight), bias, spec, y, scratch);
    } else {
      forward(context, from, ConstTensorView(view(call, "w", w)), bias, spec, y, scratch);
    }
  });
}

hot_status hot_weight_int4_bytes(int64_t out_features, int64_t in_features,
                                 const hot_forward_spec* spec, int32_t group, size_t* bytes) {
  const char* const call = "weight_int4_bytes";
  return write_result(call, "bytes", bytes, [&] {
    return hot::weight_int4_bytes(out_features, in_features, {spec_of(call, spec), group});
  });
}

hot_status hot_quantize_weight_int4(const hot_context* context, const hot_tensor* w,
                                    const hot_tensor* exponents, const hot_forward_spec* spec,
                                    int32_t group, void* data, size_t bytes, hot_weight* weight) {
  const char* const call = "quantize_weight_int4";
  return guarded([&] {
    check_struct(call, "weight", weight);
    write_weight(weight, hot::quantize_weight_int4(context_of(call, context), view(call, "w", w),
                                                   optional(call, "exponents", exponents),
                                                   {spec_of(call, spec), group}, {data, bytes}));
  });
}

hot_status hot_expand_weight_int4(const hot_context* context, const hot_weight* weight,
                                  const hot_forward_spec* spec, int32_t group, void* data,
                                  size_t bytes, hot_weight* expanded) {
  const char* const call = "expand_weight_int4";
  return guarded([&] {
    check_struct(call, "weight", weight);
    check_struct(call, "expanded", expanded);
    write_weight(expanded,
                 hot::expand_weight_int4(context_of(call, context), weight_of(call, weight),
                                         {spec_of(call, spec), group}, {data, bytes}));
  });
}

}  // extern "C"
