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
constexpr std::size_t first_size(const hot_tensor*) { return 96; }
constexpr std::size_t first_size(const hot_spec*) { return 80; }
constexpr std::size_t first_size(const hot_saved_layout*) { return 64; }
constexpr std::size_t first_size(const hot_saved*) { return 80; }
constexpr std::size_t first_size(const hot_weight*) { return 48; }
constexpr std::size_t first_size(const hot_input*) { return 48; }
constexpr std::size_t first_size(const hot_gradients*) { return 40; }
constexpr std::size_t first_size(const hot_forward_spec*) { return 16; }

// Upper limit for struct_size, so that `read` does not trust an uninitialised number.
constexpr std::size_t max_struct_size = 1024;

template <class T>
void check_struct(const char* call, const char* name, const T* from) {
  constexpr std::size_t first = first_size(static_cast<const T*>(nullptr));
  static_assert(sizeof(T) >= first);
  if (from == nullptr) invalid(call, std::string(name) + " is null");
  if (from->struct_size < first || from->struct_size > max_struct_size) {
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

// ---- arguments ---------------------------------------------------------------------------------

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

// A call of the C ABI: reads its arguments.
struct Call {
  const char* name;  // without hot_

  template <class T>
  T& place(const char* argument, T* out) const {
    if (out == nullptr) invalid(name, std::string(argument) + " is null");
    return *out;
  }
  template <class T>
  void check(const char* argument, const T* from) const {
    check_struct(name, argument, from);
  }
  template <class E>
  E choice(const char* argument, std::int32_t value, E last) const {
    if (value < 0 || value > static_cast<std::int32_t>(last)) {
      invalid(name, std::string(argument) + " is " + std::to_string(value) + "; expected 0 to " +
                        std::to_string(static_cast<std::int32_t>(last)));
    }
    return static_cast<E>(value);
  }
  const hot::Context& context(const hot_context* from) const {
    if (from == nullptr) {
      invalid(name, "context is null; expected one from hot_context_cpu or hot_context_cuda");
    }
    return from->context;
  }
  TensorView view(const char* argument, const hot_tensor* from) const {
    const hot_tensor t = read(name, argument, from);
    const std::string which = argument;
    TensorView out;
    out.data = t.data;
    out.dtype = choice((which + ".dtype").c_str(), t.dtype, hot::DType::i4x2);
    out.device.type =
        choice((which + ".device_type").c_str(), t.device_type, hot::Device::Type::cuda);
    out.device.index = t.device_index;
    if (t.ndim < 0 || t.ndim > hot::max_dims) {
      invalid(name, which + ".ndim is " + std::to_string(t.ndim) + "; expected 0 to " +
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
  ConstTensorView optional(const char* argument, const hot_tensor* from) const {
    return from == nullptr ? ConstTensorView{} : ConstTensorView(view(argument, from));
  }
  hot::BackwardLinearSpec spec(const hot_spec* from, const char* argument = "spec") const {
    return hot::detail::from_c<hot::BackwardLinearSpec>(name, argument,
                                                        read_known(name, argument, from));
  }
  hot::ForwardLinearSpec spec(const hot_forward_spec* from) const {
    return {read_known(name, "spec", from).hadamard_block};
  }
  // Reads x that was saved or a quantised w; empty if it is null.
  hot::ConstSavedActivation saved(const hot_saved* from) const {
    if (from == nullptr) return {};
    const hot_saved s = read_known(name, "saved", from);
    return {s.data,
            s.bytes,
            s.tokens,
            s.in_features,
            {s.key_seed, s.key_offset, s.key_stream, s.key_counter},
            s.format};
  }
  hot::ConstQuantizedWeight weight(const hot_weight* from) const {
    if (from == nullptr) return {};
    const hot_weight w = read(name, "weight", from);
    return {w.data, w.bytes, w.out_features, w.in_features, w.format};
  }
  hot::ConstQuantizedInput input(const hot_input* from) const {
    const hot_input x = read(name, "x", from);
    return {x.data, x.bytes, x.tokens, x.in_features, x.format};
  }
};

// Runs a call and turns its exceptions into a status.
template <class Body>
hot_status guarded(const char* name, const Body& body) noexcept {
  return guarded([&] { body(Call{name}); });
}

// Fill the caller's structs with results.
void write_result(hot_saved* out, const hot::ConstSavedActivation& s) noexcept {
  write(out, {0, s.data, s.bytes, s.tokens, s.in_features, s.key.seed, s.key.offset, s.key.counter,
              s.key.stream, 0, s.format});
}
void write_result(hot_weight* out, const hot::ConstQuantizedWeight& q) noexcept {
  write(out, {0, q.data, q.bytes, q.out_features, q.in_features, q.format});
}
void write_result(hot_input* out, const hot::ConstQuantizedInput& q) noexcept {
  write(out, {0, q.data, q.bytes, q.tokens, q.in_features, q.format});
}

// hot_backward_linear for a plain or a quantised w.
template <class Weight>
void backward(const Call& call, const hot_context* context, const hot_tensor* gy, const Weight& w,
              const hot_saved* saved, const hot_spec* spec, const hot_gradients* gradients,
              const hot::Workspace& workspace) {
  const hot::Context& c = call.context(context);
  const hot_gradients g = read_known(call.name, "out", gradients);
  TensorView gx, gw, gb;
  hot::BackwardOutputs out;
  const auto wanted = [&](const char* name, const hot_tensor* from, TensorView& to) {
    if (from == nullptr) return static_cast<const TensorView*>(nullptr);
    to = call.view(name, from);
    return static_cast<const TensorView*>(&to);
  };
  out.gx = wanted("gx", g.gx, gx);
  out.gw = wanted("gw", g.gw, gw);
  out.gb = wanted("gb", g.gb, gb);
  out.accumulate = g.accumulate != 0;
  hot::backward_linear(c, call.view("gy", gy), w, call.saved(saved), call.spec(spec), out,
                       workspace);
}

// hot_forward_linear for plain or quantised x and w.
template <class Input, class Weight>
void forward(const Call& call, const hot_context* context, const Input& x, const Weight& w,
             const hot_tensor* bias, const hot_forward_spec* spec, const hot_tensor* y,
             const hot::Workspace& workspace) {
  hot::forward_linear(call.context(context), x, w, call.optional("bias", bias), call.spec(spec),
                      call.view("y", y), workspace);
}

// Workspace of hot_forward_linear.
hot_status forward_workspace(const hot_context* context, const hot::LinearShape& shape,
                             const hot_forward_spec* spec, bool quantized_weight,
                             bool quantized_input, std::size_t* bytes) noexcept {
  return guarded("forward_linear_workspace", [&](const Call& call) {
    call.place("bytes", bytes) = hot::forward_linear_workspace(
        call.context(context), shape, call.spec(spec), quantized_weight, quantized_input);
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
hot_status make_context(const char* name, hot_context** out, const Make& make) noexcept {
  return guarded(name, [&](const Call& call) {
    hot_context*& target = call.place("out", out);
    target = new hot_context{make(call)};
  });
}

template <class Change>
hot_status change_context(const char* name, hot_context* context, const Change& change) noexcept {
  return guarded(name, [&](const Call& call) {
    const hot::Context changed = change(call, call.context(context));
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
  return make_context("context_cpu", out, [&](const Call&) { return hot::Context::cpu(threads); });
}

hot_status hot_context_cpu_on(hot_run run, void* state, int32_t threads, hot_context** out) {
  return make_context("context_cpu_on", out, [&](const Call&) {
    return hot::Context::cpu(hot::Executor{run, state}, threads);
  });
}

hot_status hot_context_cuda(int32_t device, void* stream, hot_context** out) {
  return make_context("context_cuda", out, [&](const Call&) {
    return hot::Context::cuda(device, static_cast<hot::Stream>(stream));
  });
}

hot_status hot_context_copy(const hot_context* context, hot_context** out) {
  return make_context("context_copy", out, [&](const Call& call) -> const hot::Context& {
    return call.context(context);
  });
}

void hot_context_destroy(hot_context* context) { delete context; }

hot_status hot_context_set_key(hot_context* context, uint64_t seed, uint64_t offset,
                               uint32_t stream, const uint64_t* counter) {
  return change_context("context_set_key", context, [&](const Call&, const hot::Context& c) {
    return c.with_key({seed, offset, stream, counter});
  });
}

int32_t hot_best_isa(void) { return static_cast<std::int32_t>(hot::best_isa()); }

hot_status hot_context_set_isa(hot_context* context, int32_t isa) {
  return change_context("context_set_isa", context, [&](const Call& call, const hot::Context& c) {
    return c.with_isa(call.choice("isa", isa, hot::Isa::amx));
  });
}

hot_status hot_context_set_arch(hot_context* context, int32_t arch) {
  return change_context("context_set_arch", context,
                        [&](const Call&, const hot::Context& c) { return c.with_arch(arch); });
}

hot_status hot_context_set_sm_margin(hot_context* context, int32_t sms) {
  return change_context("context_set_sm_margin", context,
                        [&](const Call&, const hot::Context& c) { return c.with_sm_margin(sms); });
}

int32_t hot_context_threads(const hot_context* context) {
  return context == nullptr ? 0 : context->context.threads();
}

// ---- specs and recipes -------------------------------------------------------------------------

hot_status hot_spec_recipe(const char* name, hot_spec* spec) {
  return guarded("recipe", [&](const Call& call) {
    call.place("name", name);
    call.check("spec", spec);
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
  return guarded("spec_get", [&](const Call& call) {
    const hot::BackwardLinearSpec current = call.spec(spec);
    call.place("field", field);
    call.place("text", text);
    hot::detail::with_field<hot::BackwardLinearSpec>(field, [&](const auto& row) {
      const std::string value = hot::detail::field_text(row, row.get(current));
      if (value.size() >= bytes) {
        invalid(call.name, "text holds " + std::to_string(bytes) + " bytes; " + row.name +
                               " needs " + std::to_string(value.size() + 1));
      }
      std::memcpy(text, value.c_str(), value.size() + 1);
    });
  });
}

hot_status hot_spec_set(hot_spec* spec, const char* field, const char* text) {
  return guarded("spec_set", [&](const Call& call) {
    hot::BackwardLinearSpec changed = call.spec(spec);
    call.place("field", field);
    call.place("text", text);
    hot::detail::with_field<hot::BackwardLinearSpec>(field, [&](const auto& row) {
      using T = typename std::decay_t<decltype(row)>::Value;
      if constexpr (std::is_same_v<T, std::vector<int>>) {
        invalid(call.name,
                std::string(row.name) + " is the caller's array; set spec.rows and row_count");
      } else {
        hot::detail::set_field_text(row, text, row.get(changed));
      }
    });
    hot_spec out = read(call.name, "spec", spec);
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
  return guarded("supported", [&](const Call& call) {
    check_supported(hot::supported(call.context(context), {tokens, out_features, in_features},
                                   call.spec(spec)));
  });
}

// ---- single stages -----------------------------------------------------------------------------

hot_status hot_fwht(const hot_context* context, const hot_tensor* x, int32_t axis, int32_t block,
                    const hot_tensor* out) {
  return guarded("fwht", [&](const Call& call) {
    hot::fwht(call.context(context), call.view("x", x), axis, block, call.view("out", out));
  });
}

hot_status hot_basis_order(int32_t basis, int32_t block, int32_t* rows) {
  return guarded("basis_order", [&](const Call& call) {
    const std::vector<int> order =
        hot::basis_order(call.choice("basis", basis, hot::Basis::sketch), block);
    std::int32_t* const to = &call.place("rows", rows);
    for (std::size_t i = 0; i < order.size(); ++i) to[i] = order[i];
  });
}

hot_status hot_hla_rows(int64_t tokens, const hot_spec* spec, int64_t* rows) {
  return guarded("hla_rows", [&](const Call& call) {
    call.place("rows", rows) = hot::hla_rows(tokens, call.spec(spec).low_rank);
  });
}

hot_status hot_hla(const hot_context* context, const hot_tensor* x, const hot_spec* spec,
                   int32_t side, const hot_tensor* out) {
  return guarded("hla", [&](const Call& call) {
    hot::hla(call.context(context), call.view("x", x), call.spec(spec).low_rank,
             call.choice("side", side, hot::Side::gradient), call.view("out", out));
  });
}

hot_status hot_quantize(const hot_context* context, const hot_tensor* x, int32_t bits,
                        int32_t granularity, int32_t rounding, const hot_tensor* q,
                        const hot_tensor* scale) {
  return guarded("quantize", [&](const Call& call) {
    const hot::QuantSpec spec{bits,
                              call.choice("granularity", granularity, hot::Granularity::channel),
                              call.choice("rounding", rounding, hot::Rounding::pseudo_stochastic)};
    hot::quantize(call.context(context), call.view("x", x), spec, call.view("q", q),
                  call.view("scale", scale));
  });
}

hot_status hot_dequantize(const hot_context* context, const hot_tensor* q, const hot_tensor* scale,
                          int32_t granularity, const hot_tensor* out) {
  return guarded("dequantize", [&](const Call& call) {
    hot::dequantize(call.context(context), call.view("q", q), call.view("scale", scale),
                    call.choice("granularity", granularity, hot::Granularity::channel),
                    call.view("out", out));
  });
}

hot_status hot_pack_int4(const hot_context* context, const hot_tensor* q, const hot_tensor* out) {
  return guarded("pack_int4", [&](const Call& call) {
    hot::pack_int4(call.context(context), call.view("q", q), call.view("out", out));
  });
}

hot_status hot_unpack_int4(const hot_context* context, const hot_tensor* packed,
                           const hot_tensor* out) {
  return guarded("unpack_int4", [&](const Call& call) {
    hot::unpack_int4(call.context(context), call.view("packed", packed), call.view("out", out));
  });
}

hot_status hot_encode_blocks(const hot_context* context, const hot_tensor* x, int32_t rounding,
                             const hot_tensor* wire) {
  return guarded("encode_blocks", [&](const Call& call) {
    hot::encode_blocks(call.context(context), call.view("x", x),
                       call.choice("rounding", rounding, hot::Rounding::pseudo_stochastic),
                       call.view("wire", wire));
  });
}

hot_status hot_sum_blocks(const hot_context* context, const hot_tensor* wire, float factor,
                          const hot_tensor* out) {
  return guarded("sum_blocks", [&](const Call& call) {
    hot::sum_blocks(call.context(context), call.view("wire", wire), factor, call.view("out", out));
  });
}

hot_status hot_gemm_workspace(const hot_context* context, int64_t m, int64_t n, int64_t k,
                              size_t* bytes) {
  return guarded("gemm_workspace", [&](const Call& call) {
    call.place("bytes", bytes) = hot::gemm_workspace(call.context(context), m, n, k);
  });
}

hot_status hot_gemm_int8(const hot_context* context, const hot_tensor* a, const hot_tensor* b,
                         const hot_tensor* a_scale, const hot_tensor* b_scale, int32_t divisor,
                         int32_t accumulate, const hot_tensor* out, void* workspace,
                         size_t workspace_bytes) {
  return guarded("gemm_int8", [&](const Call& call) {
    hot::gemm_int8(call.context(context), call.view("a", a), call.view("b", b),
                   call.optional("a_scale", a_scale), call.optional("b_scale", b_scale),
                   {divisor, accumulate != 0}, call.view("out", out), {workspace, workspace_bytes});
  });
}

hot_status hot_gemm_int4(const hot_context* context, const hot_tensor* a, const hot_tensor* b,
                         int64_t k, const hot_tensor* a_scale, const hot_tensor* b_scale,
                         int32_t divisor, int32_t accumulate, const hot_tensor* out,
                         void* workspace, size_t workspace_bytes) {
  return guarded("gemm_int4", [&](const Call& call) {
    hot::gemm_int4(call.context(context), call.view("a", a), call.view("b", b), k,
                   call.optional("a_scale", a_scale), call.optional("b_scale", b_scale),
                   {divisor, accumulate != 0}, call.view("out", out), {workspace, workspace_bytes});
  });
}

// ---- a linear layer ----------------------------------------------------------------------------

hot_status hot_saved_layout_of(int64_t tokens, int64_t in_features, const hot_spec* spec,
                               hot_saved_layout* layout) {
  return guarded("saved_layout", [&](const Call& call) {
    call.check("layout", layout);
    const hot::SavedLayout l = hot::saved_layout(tokens, in_features, call.spec(spec));
    write(layout, {0, l.bytes, l.channels, l.k, l.k_padded, l.row_bytes, l.scales, l.scale_offset,
                   l.exponent_offset});
  });
}

hot_status hot_compress_activation_workspace(const hot_context* context, int64_t tokens,
                                             int64_t in_features, const hot_spec* spec,
                                             size_t* bytes) {
  return guarded("compress_activation_workspace", [&](const Call& call) {
    call.place("bytes", bytes) = hot::compress_activation_workspace(call.context(context), tokens,
                                                                    in_features, call.spec(spec));
  });
}

hot_status hot_compress_activation(const hot_context* context, const hot_tensor* x,
                                   const hot_spec* spec, void* data, size_t bytes, void* workspace,
                                   size_t workspace_bytes, hot_saved* saved) {
  return guarded("compress_activation", [&](const Call& call) {
    call.check("saved", saved);
    write_result(saved,
                 hot::compress_activation(call.context(context), call.view("x", x), call.spec(spec),
                                          {data, bytes}, {workspace, workspace_bytes}));
  });
}

hot_status hot_decompress_activation(const hot_context* context, const hot_saved* saved,
                                     int64_t first, int64_t last, const hot_spec* spec,
                                     const hot_tensor* out) {
  return guarded("decompress_activation", [&](const Call& call) {
    call.check("saved", saved);
    hot::decompress_activation(call.context(context), call.saved(saved), first, last,
                               call.spec(spec), call.view("out", out));
  });
}

hot_status hot_quantized_weight_bytes(int64_t out_features, int64_t in_features,
                                      const hot_spec* spec, size_t* bytes) {
  return guarded("quantized_weight_bytes", [&](const Call& call) {
    call.place("bytes", bytes) =
        hot::quantized_weight_bytes(out_features, in_features, call.spec(spec));
  });
}

hot_status hot_quantize_weight_workspace(const hot_context* context, int64_t out_features,
                                         int64_t in_features, const hot_spec* spec, size_t* bytes) {
  return guarded("quantize_weight_workspace", [&](const Call& call) {
    call.place("bytes", bytes) = hot::quantize_weight_workspace(call.context(context), out_features,
                                                                in_features, call.spec(spec));
  });
}

hot_status hot_quantize_weight(const hot_context* context, const hot_tensor* w,
                               const hot_spec* spec, void* data, size_t bytes, void* workspace,
                               size_t workspace_bytes, hot_weight* weight) {
  return guarded("quantize_weight", [&](const Call& call) {
    call.check("weight", weight);
    write_result(weight,
                 hot::quantize_weight(call.context(context), call.view("w", w), call.spec(spec),
                                      {data, bytes}, {workspace, workspace_bytes}));
  });
}

hot_status hot_backward_linear_workspace(const hot_context* context, int64_t tokens,
                                         int64_t out_features, int64_t in_features,
                                         const hot_spec* spec, int32_t need_gx, int32_t need_gw,
                                         size_t* bytes) {
  return guarded("backward_linear_workspace", [&](const Call& call) {
    call.place("bytes", bytes) =
        hot::backward_linear_workspace(call.context(context), {tokens, out_features, in_features},
                                       call.spec(spec), need_gx != 0, need_gw != 0);
  });
}

hot_status hot_backward_linear(const hot_context* context, const hot_tensor* gy,
                               const hot_tensor* w, const hot_saved* saved, const hot_spec* spec,
                               const hot_gradients* out, void* workspace, size_t workspace_bytes) {
  return guarded("backward_linear", [&](const Call& call) {
    backward(call, context, gy, call.optional("w", w), saved, spec, out,
             {workspace, workspace_bytes});
  });
}

hot_status hot_backward_linear_quantized(const hot_context* context, const hot_tensor* gy,
                                         const hot_weight* weight, const hot_saved* saved,
                                         const hot_spec* spec, const hot_gradients* out,
                                         void* workspace, size_t workspace_bytes) {
  return guarded("backward_linear", [&](const Call& call) {
    backward(call, context, gy, call.weight(weight), saved, spec, out,
             {workspace, workspace_bytes});
  });
}

hot_status hot_forward_supported(const hot_context* context, int64_t tokens, int64_t out_features,
                                 int64_t in_features, const hot_forward_spec* spec) {
  return guarded("forward_supported", [&](const Call& call) {
    check_supported(hot::forward_supported(call.context(context),
                                           {tokens, out_features, in_features}, call.spec(spec)));
  });
}

hot_status hot_forward_weight_bytes(int64_t out_features, int64_t in_features,
                                    const hot_forward_spec* spec, size_t* bytes) {
  return guarded("forward_weight_bytes", [&](const Call& call) {
    call.place("bytes", bytes) =
        hot::forward_weight_bytes(out_features, in_features, call.spec(spec));
  });
}

hot_status hot_quantize_forward_weight(const hot_context* context, const hot_tensor* w,
                                       const hot_forward_spec* spec, void* data, size_t bytes,
                                       hot_weight* weight) {
  return guarded("quantize_forward_weight", [&](const Call& call) {
    call.check("weight", weight);
    write_result(weight, hot::quantize_forward_weight(call.context(context), call.view("w", w),
                                                      call.spec(spec), {data, bytes}));
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
  return guarded("forward_linear", [&](const Call& call) {
    forward(call, context, ConstTensorView(call.view("x", x)), ConstTensorView(call.view("w", w)),
            bias, spec, y, {workspace, workspace_bytes});
  });
}

hot_status hot_forward_linear_quantized(const hot_context* context, const hot_tensor* x,
                                        const hot_weight* weight, const hot_tensor* bias,
                                        const hot_forward_spec* spec, const hot_tensor* y,
                                        void* workspace, size_t workspace_bytes) {
  return guarded("forward_linear", [&](const Call& call) {
    call.check("weight", weight);
    forward(call, context, ConstTensorView(call.view("x", x)), call.weight(weight), bias, spec, y,
            {workspace, workspace_bytes});
  });
}

hot_status hot_forward_input_bytes(int64_t tokens, int64_t in_features,
                                   const hot_forward_spec* spec, size_t* bytes) {
  return guarded("forward_input_bytes", [&](const Call& call) {
    call.place("bytes", bytes) = hot::forward_input_bytes(tokens, in_features, call.spec(spec));
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
  return guarded("quantize_forward_input", [&](const Call& call) {
    call.check("input", input);
    const hot::Context& c = call.context(context);
    const ConstTensorView from = call.view("x", x);
    const ConstTensorView powers = call.optional("exponents", exponents);
    const hot::ForwardLinearSpec forward_spec = call.spec(spec);
    if (kept == nullptr) {
      return write_result(
          input, hot::quantize_forward_input(c, from, forward_spec, {data, bytes}, powers));
    }
    call.check("saved", saved);
    const hot::ForwardInput result = hot::quantize_forward_input(
        c, from, forward_spec, {data, bytes}, call.spec(kept, "kept"), {saved_data, saved_bytes},
        {workspace, workspace_bytes}, powers);
    write_result(input, result.quantized);
    write_result(saved, result.saved);
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
  return guarded("forward_linear", [&](const Call& call) {
    if ((w == nullptr) == (weight == nullptr)) {
      invalid(call.name, std::string("w and weight are both ") + (w == nullptr ? "null" : "given") +
                             "; expected one of them");
    }
    const hot::ConstQuantizedInput from = call.input(x);
    const hot::Workspace scratch{workspace, workspace_bytes};
    if (weight != nullptr) {
      forward(call, context, from, call.weight(weight), bias, spec, y, scratch);
    } else {
      forward(call, context, from, ConstTensorView(call.view("w", w)), bias, spec, y, scratch);
    }
  });
}

hot_status hot_weight_int4_bytes(int64_t out_features, int64_t in_features,
                                 const hot_forward_spec* spec, int32_t group, size_t* bytes) {
  return guarded("weight_int4_bytes", [&](const Call& call) {
    call.place("bytes", bytes) =
        hot::weight_int4_bytes(out_features, in_features, {call.spec(spec), group});
  });
}

hot_status hot_quantize_weight_int4(const hot_context* context, const hot_tensor* w,
                                    const hot_tensor* exponents, const hot_forward_spec* spec,
                                    int32_t group, void* data, size_t bytes, hot_weight* weight) {
  return guarded("quantize_weight_int4", [&](const Call& call) {
    call.check("weight", weight);
    write_result(weight, hot::quantize_weight_int4(call.context(context), call.view("w", w),
                                                   call.optional("exponents", exponents),
                                                   {call.spec(spec), group}, {data, bytes}));
  });
}

hot_status hot_expand_weight_int4(const hot_context* context, const hot_weight* weight,
                                  const hot_forward_spec* spec, int32_t group, void* data,
                                  size_t bytes, hot_weight* expanded) {
  return guarded("expand_weight_int4", [&](const Call& call) {
    call.check("weight", weight);
    call.check("expanded", expanded);
    write_result(expanded, hot::expand_weight_int4(call.context(context), call.weight(weight),
                                                   {call.spec(spec), group}, {data, bytes}));
  });
}

hot_status hot_dequantize_weight(const hot_context* context, const hot_weight* weight,
                                 const hot_forward_spec* spec, const hot_tensor* exponents,
                                 const hot_tensor* out) {
  return guarded("dequantize_weight", [&](const Call& call) {
    hot::dequantize_weight(call.context(context), call.weight(weight), call.spec(spec),
                           call.view("out", out), call.optional("exponents", exponents));
  });
}

}  // extern "C"
