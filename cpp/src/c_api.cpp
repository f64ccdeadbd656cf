// The C ABI: reads structs and handles, calls the C++ API, turns exceptions into status codes.
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "checks.h"
#include "config_fields.h"
#include "hot/hot.h"
#include "hot/hot_c.h"

struct hot_context {
  hot::Context context;
};

namespace {

using namespace hot;
using detail::invalid;

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

hot_status status_of(ErrorCode code) noexcept {
  constexpr hot_status statuses[] = {HOT_INVALID_ARGUMENT, HOT_UNSUPPORTED, HOT_WORKSPACE_TOO_SMALL,
                                     HOT_CUDA_ERROR};  // in the order of ErrorCode
  return statuses[static_cast<std::size_t>(code)];
}

template <class Call>
hot_status guarded(const Call& call) noexcept {
  try {
    call();
    return HOT_OK;
  } catch (const Error& error) {
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
  if (from == nullptr) invalid(call, name, " is null");
  if (from->struct_size < first || from->struct_size > max_struct_size) {
    invalid(call, name, ".struct_size is ", from->struct_size,
            "; expected the size of the struct, ", sizeof(T));
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
      invalid(call, name, ".struct_size is ", size, " and uses members that libhot ", version(),
              " does not have; it knows ", sizeof(T), " bytes");
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
  if (out.reserved != 0) invalid(call, name, ".reserved is ", out.reserved, "; expected 0");
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
static_assert(same(HOT_F32, DType::f32) && same(HOT_F16, DType::f16) &&
              same(HOT_BF16, DType::bf16) && same(HOT_I8, DType::i8) && same(HOT_I32, DType::i32) &&
              same(HOT_I4X2, DType::i4x2));
static_assert(same(HOT_CPU, Device::Type::cpu) && same(HOT_CUDA, Device::Type::cuda) &&
              HOT_MAX_DIMS == max_dims);
static_assert(same(HOT_ISA_PLAIN, Isa::plain) && same(HOT_ISA_AVX2, Isa::avx2) &&
              same(HOT_ISA_AVX512, Isa::avx512) && same(HOT_ISA_AMX, Isa::amx));
static_assert(same(HOT_SIDE_ACTIVATION, Side::activation) &&
              same(HOT_SIDE_GRADIENT, Side::gradient));

// True if the numbers of a field's choices equal the header's constants, in this order.
template <class E>
constexpr bool same(detail::Choices<E> choices, std::initializer_list<int> constants) {
  auto constant = constants.begin();
  for (const auto& one : choices) {
    if (constant == constants.end() || one.number != *constant++) return false;
  }
  return constant == constants.end();
}
static_assert(same(detail::granularities, {HOT_SCALE_TENSOR, HOT_SCALE_TOKEN, HOT_SCALE_CHANNEL}) &&
              same(detail::gx_scales, {HOT_SCALE_TOKEN, HOT_SCALE_TENSOR}));
static_assert(same(detail::roundings, {HOT_STOCHASTIC, HOT_NEAREST, HOT_PSEUDO_STOCHASTIC}));
static_assert(same(detail::bases,
                   {HOT_BASIS_FULL, HOT_BASIS_LOWPASS, HOT_BASIS_SEQUENCY, HOT_BASIS_SKETCH}));
static_assert(same(detail::gw_scales,
                   {HOT_GW_SCALE_CHANNEL, HOT_GW_SCALE_TENSOR, HOT_GW_SCALE_TOKEN}));
static_assert(same(detail::storages, {HOT_STORAGE_INT8, HOT_STORAGE_INT4}));

// Arguments with the names that errors give them.
struct Array {
  const char* name;
  const hot_tensor* from;
};
struct OptionalArray : Array {};  // null: none
template <class T>
struct Given {  // a struct that may not be null
  const char* name;
  const T* from;
};
template <class E>
struct Choice {
  const char* name;
  std::int32_t value;
  E last;
};

// Spec of a weight in INT4.
struct Int4 {
  const hot_forward_spec* spec;
  std::int32_t group;
};

// A call of the C ABI: converts its arguments by their types.
struct Call {
  const char* name;  // without hot_

  template <class T>
  T& place(const char* argument, T* out) const {
    if (out == nullptr) invalid(name, argument, " is null");
    return *out;
  }
  template <class T>
  void check(const char* argument, const T* from) const {
    check_struct(name, argument, from);
  }

  template <class T>
  std::enable_if_t<!std::is_pointer_v<T>, const T&> operator()(const T& value) const {
    return value;
  }
  template <class E>
  E operator()(const Choice<E>& from) const {
    const auto last = static_cast<std::int32_t>(from.last);
    if (from.value < 0 || from.value > last) {
      invalid(name, from.name, " is ", from.value, "; expected 0 to ", last);
    }
    return static_cast<E>(from.value);
  }
  const Context& operator()(const hot_context* from) const {
    if (from == nullptr) {
      invalid(name, "context is null; expected one from hot_context_cpu or hot_context_cuda");
    }
    return from->context;
  }
  TensorView operator()(const Array& array) const {
    const hot_tensor t = read(name, array.name, array.from);
    const std::string dtype = std::string(array.name) + ".dtype",
                      device = std::string(array.name) + ".device_type";
    TensorView out;
    out.data = t.data;
    out.dtype = (*this)(Choice<DType>{dtype.c_str(), t.dtype, DType::i4x2});
    out.device.type =
        (*this)(Choice<Device::Type>{device.c_str(), t.device_type, Device::Type::cuda});
    out.device.index = t.device_index;
    if (t.ndim < 0 || t.ndim > max_dims) {
      invalid(name, array.name, ".ndim is ", t.ndim, "; expected 0 to ", max_dims);
    }
    out.ndim = t.ndim;
    for (int d = 0; d < t.ndim; ++d) {
      out.shape[d] = t.shape[d];
      out.stride[d] = t.stride[d];
    }
    return out;
  }
  ConstTensorView operator()(const OptionalArray& array) const {
    if (array.from == nullptr) return {};
    return (*this)(static_cast<const Array&>(array));
  }
  BackwardLinearSpec operator()(const hot_spec* from, const char* argument = "spec") const {
    return detail::from_c<BackwardLinearSpec>(name, argument, read_known(name, argument, from));
  }
  ForwardLinearSpec operator()(const hot_forward_spec* from) const {
    return {read_known(name, "spec", from).hadamard_block};
  }
  WeightInt4Spec operator()(const Int4& from) const { return {(*this)(from.spec), from.group}; }
  template <class T>
  auto operator()(const Given<T>& from) const {
    check(from.name, from.from);
    return (*this)(from.from);
  }
  // x that was saved, or a quantised w: empty if it is null.
  ConstSavedActivation operator()(const hot_saved* from) const {
    if (from == nullptr) return {};
    const hot_saved s = read_known(name, "saved", from);
    const Key key{s.key_seed, s.key_offset, s.key_stream, s.key_counter};
    return {s.data, s.bytes, s.tokens, s.in_features, key, s.format};
  }
  ConstQuantizedWeight operator()(const hot_weight* from) const {
    if (from == nullptr) return {};
    const hot_weight w = read(name, "weight", from);
    return {w.data, w.bytes, w.out_features, w.in_features, w.format};
  }
  ConstQuantizedInput operator()(const hot_input* from) const {
    const hot_input x = read(name, "x", from);
    return {x.data, x.bytes, x.tokens, x.in_features, x.format};
  }
};

// Runs a call and turns its exceptions into a status.
template <class Body>
hot_status guarded(const char* name, const Body& body) noexcept {
  return guarded([&] { body(Call{name}); });
}

// Result of `work` with converted arguments, which are read from left to right.
template <class Work, class... Args>
decltype(auto) converted(const Call& call, const Work& work, const Args&... args) {
  return std::apply(work, std::tuple<decltype(call(args))...>{call(args)...});
}

template <class Work, class... Args>
hot_status run(const char* name, const Work& work, const Args&... args) noexcept {
  return guarded(name, [&](const Call& call) { converted(call, work, args...); });
}

// Fill the caller's structs with results.
void write_result(hot_saved* out, const ConstSavedActivation& s) noexcept {
  write(out, {0, s.data, s.bytes, s.tokens, s.in_features, s.key.seed, s.key.offset, s.key.counter,
              s.key.stream, 0, s.format});
}
void write_result(hot_weight* out, const ConstQuantizedWeight& q) noexcept {
  write(out, {0, q.data, q.bytes, q.out_features, q.in_features, q.format});
}
void write_result(hot_input* out, const ConstQuantizedInput& q) noexcept {
  write(out, {0, q.data, q.bytes, q.tokens, q.in_features, q.format});
}

void write_result(hot_saved_layout* out, const SavedLayout& l) noexcept {
  write(out, {0, l.bytes, l.channels, l.k, l.k_padded, l.row_bytes, l.scales, l.scale_offset,
              l.exponent_offset});
}

// `run` whose result goes to the caller's number or struct.
template <class T, class Work, class... Args>
hot_status fill(const char* name, const char* argument, T* out, const Work& work,
                const Args&... args) noexcept {
  return guarded(name, [&](const Call& call) {
    if constexpr (std::is_class_v<T>) {
      call.check(argument, out);
      write_result(out, converted(call, work, args...));
    } else {
      call.place(argument, out) = converted(call, work, args...);
    }
  });
}

// hot_backward_linear for a plain or a quantised w.
template <class Weight>
hot_status backward(const hot_context* context, const hot_tensor* gy, const Weight& w,
                    const hot_saved* saved, const hot_spec* spec, const hot_gradients* gradients,
                    const Workspace& workspace) noexcept {
  return guarded("backward_linear", [&](const Call& call) {
    const Context& c = call(context);
    const hot_gradients g = read_known(call.name, "out", gradients);
    TensorView views[3];
    const auto wanted = [&](const Array& array, TensorView& to) -> const TensorView* {
      if (array.from == nullptr) return nullptr;
      to = call(array);
      return &to;
    };
    const BackwardOutputs out{wanted({"gx", g.gx}, views[0]), wanted({"gw", g.gw}, views[1]),
                              wanted({"gb", g.gb}, views[2]), g.accumulate != 0};
    backward_linear(c, call(Array{"gy", gy}), call(w), call(saved), call(spec), out, workspace);
  });
}

// hot_forward_linear for plain or quantised x and w.
template <class Input, class Weight>
hot_status forward(const hot_context* context, const Input& x, const Weight& w,
                   const hot_tensor* bias, const hot_forward_spec* spec, const hot_tensor* y,
                   const Workspace& workspace) noexcept {
  const auto work = [](const auto&... args) { forward_linear(args...); };
  return run("forward_linear", work, context, x, w, OptionalArray{{"bias", bias}}, spec,
             Array{"y", y}, workspace);
}

void check_supported(const Support& support) {
  if (!support.ok) throw Error(ErrorCode::unsupported, support.why);
}

// A new context that `make` returns.
template <class Make, class... Args>
hot_status make_context(const char* name, hot_context** out, const Make& make,
                        const Args&... args) noexcept {
  return guarded(name, [&](const Call& call) {
    hot_context*& target = call.place("out", out);
    target = new hot_context{converted(call, make, args...)};
  });
}

// `change` is a method of Context that returns a changed copy.
template <class Change, class... Args>
hot_status change_context(const char* name, hot_context* context, Change change,
                          const Args&... args) noexcept {
  return guarded(name, [&](const Call& call) {
    context->context = Context((call(context).*change)(call(args)...));
  });
}

}  // namespace

extern "C" {

// ---- errors and the build ----------------------------------------------------------------------

const char* hot_status_name(hot_status status) {
  static constexpr const char* names[] = {
      "ok",         "invalid_argument", "unsupported",   "workspace_too_small",
      "cuda_error", "out_of_memory",    "internal_error"};
  return detail::name_in(names, status);
}

const char* hot_last_error(void) { return error_text; }

const char* hot_version(void) { return version(); }

int32_t hot_built_with_cuda(void) { return built_with_cuda() ? 1 : 0; }

const char* hot_cuda_architectures(void) { return cuda_architectures(); }

size_t hot_dtype_size(int32_t dtype) {
  const bool known = dtype >= HOT_F32 && dtype <= HOT_I4X2;
  return known ? dtype_size(static_cast<DType>(dtype)) : 0;
}

// ---- contexts ----------------------------------------------------------------------------------

hot_status hot_context_cpu(int32_t threads, hot_context** out) {
  return make_context("context_cpu", out, [&] { return Context::cpu(threads); });
}

hot_status hot_context_cpu_on(hot_run run, void* state, int32_t threads, hot_context** out) {
  return make_context("context_cpu_on", out,
                      [&] { return Context::cpu(Executor{run, state}, threads); });
}

hot_status hot_context_cuda(int32_t device, void* stream, hot_context** out) {
  return make_context("context_cuda", out,
                      [&] { return Context::cuda(device, static_cast<Stream>(stream)); });
}

hot_status hot_context_copy(const hot_context* context, hot_context** out) {
  return make_context("context_copy", out, [](const Context& c) { return c; }, context);
}

void hot_context_destroy(hot_context* context) { delete context; }

hot_status hot_context_set_key(hot_context* context, uint64_t seed, uint64_t offset,
                               uint32_t stream, const uint64_t* counter) {
  return change_context("context_set_key", context, &Context::with_key,
                        Key{seed, offset, stream, counter});
}

int32_t hot_best_isa(void) { return static_cast<std::int32_t>(best_isa()); }

hot_status hot_context_set_isa(hot_context* context, int32_t isa) {
  return change_context("context_set_isa", context, &Context::with_isa,
                        Choice<Isa>{"isa", isa, Isa::amx});
}

hot_status hot_context_set_arch(hot_context* context, int32_t arch) {
  return change_context("context_set_arch", context, &Context::with_arch, arch);
}

hot_status hot_context_set_sm_margin(hot_context* context, int32_t sms) {
  return change_context("context_set_sm_margin", context, &Context::with_sm_margin, sms);
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
    detail::to_c(recipe(name), out);
    write(spec, out);
  });
}

const char* hot_spec_field(int32_t index) {
  const char* name = nullptr;
  std::int32_t at = 0;
  detail::for_each_field(detail::FieldsOf<BackwardLinearSpec>{}, [&](const auto& field) {
    if (at++ == index) name = field.name;
  });
  return name;
}

hot_status hot_spec_get(const hot_spec* spec, const char* field, char* text, size_t bytes) {
  return guarded("spec_get", [&](const Call& call) {
    const BackwardLinearSpec current = call(spec);
    call.place("field", field);
    call.place("text", text);
    detail::with_field<BackwardLinearSpec>(field, [&](const auto& row) {
      const std::string value = detail::field_text(row, row.get(current));
      if (value.size() >= bytes) {
        invalid(call.name, "text holds ", bytes, " bytes; ", row.name, " needs ", value.size() + 1);
      }
      std::memcpy(text, value.c_str(), value.size() + 1);
    });
  });
}

hot_status hot_spec_set(hot_spec* spec, const char* field, const char* text) {
  return guarded("spec_set", [&](const Call& call) {
    BackwardLinearSpec changed = call(spec);
    call.place("field", field);
    call.place("text", text);
    detail::with_field<BackwardLinearSpec>(field, [&](const auto& row) {
      using T = typename std::decay_t<decltype(row)>::Value;
      if constexpr (std::is_same_v<T, std::vector<int>>) {
        invalid(call.name, row.name, " is the caller's array; set spec.rows and row_count");
      } else {
        detail::set_field_text(row, text, row.get(changed));
      }
    });
    hot_spec out = read(call.name, "spec", spec);
    detail::to_c(changed, out);
    write(spec, out);
  });
}

const char* hot_recipe_name(int32_t index) { return detail::recipe_name(index); }

hot_status hot_supported(const hot_context* context, int64_t tokens, int64_t out_features,
                         int64_t in_features, const hot_spec* spec) {
  return run(
      "supported", [](const auto&... args) { check_supported(supported(args...)); }, context,
      LinearShape{tokens, out_features, in_features}, spec);
}

// ---- single stages -----------------------------------------------------------------------------

hot_status hot_fwht(const hot_context* context, const hot_tensor* x, int32_t axis, int32_t block,
                    const hot_tensor* out) {
  return run("fwht", fwht, context, Array{"x", x}, axis, block, Array{"out", out});
}

hot_status hot_basis_order(int32_t basis, int32_t block, int32_t* rows) {
  return guarded("basis_order", [&](const Call& call) {
    const std::vector<int> order =
        basis_order(call(Choice<Basis>{"basis", basis, Basis::sketch}), block);
    std::int32_t* const to = &call.place("rows", rows);
    for (std::size_t i = 0; i < order.size(); ++i) to[i] = order[i];
  });
}

hot_status hot_hla_rows(int64_t tokens, const hot_spec* spec, int64_t* rows) {
  return fill(
      "hla_rows", "rows", rows,
      [&](const BackwardLinearSpec& s) { return hla_rows(tokens, s.low_rank); }, spec);
}

hot_status hot_hla(const hot_context* context, const hot_tensor* x, const hot_spec* spec,
                   int32_t side, const hot_tensor* out) {
  const auto work = [](const Context& c, const ConstTensorView& from, const BackwardLinearSpec& s,
                       Side of, const TensorView& to) { hla(c, from, s.low_rank, of, to); };
  return run("hla", work, context, Array{"x", x}, spec, Choice<Side>{"side", side, Side::gradient},
             Array{"out", out});
}

hot_status hot_quantize(const hot_context* context, const hot_tensor* x, int32_t bits,
                        int32_t granularity, int32_t rounding, const hot_tensor* q,
                        const hot_tensor* scale) {
  const auto work = [&](const Context& c, const ConstTensorView& from, Granularity each,
                        Rounding by, const TensorView& codes, const TensorView& scales) {
    quantize(c, from, {bits, each, by}, codes, scales);
  };
  return run("quantize", work, context, Array{"x", x},
             Choice<Granularity>{"granularity", granularity, Granularity::channel},
             Choice<Rounding>{"rounding", rounding, Rounding::pseudo_stochastic}, Array{"q", q},
             Array{"scale", scale});
}

hot_status hot_dequantize(const hot_context* context, const hot_tensor* q, const hot_tensor* scale,
                          int32_t granularity, const hot_tensor* out) {
  return run("dequantize", dequantize, context, Array{"q", q}, Array{"scale", scale},
             Choice<Granularity>{"granularity", granularity, Granularity::channel},
             Array{"out", out});
}

hot_status hot_pack_int4(const hot_context* context, const hot_tensor* q, const hot_tensor* out) {
  return run("pack_int4", pack_int4, context, Array{"q", q}, Array{"out", out});
}

hot_status hot_unpack_int4(const hot_context* context, const hot_tensor* packed,
                           const hot_tensor* out) {
  return run("unpack_int4", unpack_int4, context, Array{"packed", packed}, Array{"out", out});
}

hot_status hot_encode_blocks(const hot_context* context, const hot_tensor* x, int32_t rounding,
                             const hot_tensor* wire) {
  return run("encode_blocks", encode_blocks, context, Array{"x", x},
             Choice<Rounding>{"rounding", rounding, Rounding::pseudo_stochastic},
             Array{"wire", wire});
}

hot_status hot_sum_blocks(const hot_context* context, const hot_tensor* wire, float factor,
                          const hot_tensor* out) {
  return run("sum_blocks", sum_blocks, context, Array{"wire", wire}, factor, Array{"out", out});
}

hot_status hot_gemm_workspace(const hot_context* context, int64_t m, int64_t n, int64_t k,
                              size_t* bytes) {
  return fill("gemm_workspace", "bytes", bytes, gemm_workspace, context, m, n, k);
}

hot_status hot_gemm_int8(const hot_context* context, const hot_tensor* a, const hot_tensor* b,
                         const hot_tensor* a_scale, const hot_tensor* b_scale, int32_t divisor,
                         int32_t accumulate, const hot_tensor* out, void* workspace,
                         size_t workspace_bytes) {
  return run("gemm_int8", gemm_int8, context, Array{"a", a}, Array{"b", b},
             OptionalArray{{"a_scale", a_scale}}, OptionalArray{{"b_scale", b_scale}},
             GemmSpec{divisor, accumulate != 0}, Array{"out", out},
             Workspace{workspace, workspace_bytes});
}

hot_status hot_gemm_int4(const hot_context* context, const hot_tensor* a, const hot_tensor* b,
                         int64_t k, const hot_tensor* a_scale, const hot_tensor* b_scale,
                         int32_t divisor, int32_t accumulate, const hot_tensor* out,
                         void* workspace, size_t workspace_bytes) {
  return run("gemm_int4", gemm_int4, context, Array{"a", a}, Array{"b", b}, k,
             OptionalArray{{"a_scale", a_scale}}, OptionalArray{{"b_scale", b_scale}},
             GemmSpec{divisor, accumulate != 0}, Array{"out", out},
             Workspace{workspace, workspace_bytes});
}

// ---- a linear layer ----------------------------------------------------------------------------

hot_status hot_saved_layout_of(int64_t tokens, int64_t in_features, const hot_spec* spec,
                               hot_saved_layout* layout) {
  return fill("saved_layout", "layout", layout, saved_layout, tokens, in_features, spec);
}

hot_status hot_compress_activation_workspace(const hot_context* context, int64_t tokens,
                                             int64_t in_features, const hot_spec* spec,
                                             size_t* bytes) {
  return fill("compress_activation_workspace", "bytes", bytes, compress_activation_workspace,
              context, tokens, in_features, spec);
}

hot_status hot_compress_activation(const hot_context* context, const hot_tensor* x,
                                   const hot_spec* spec, void* data, size_t bytes, void* workspace,
                                   size_t workspace_bytes, hot_saved* saved) {
  return fill("compress_activation", "saved", saved, compress_activation, context, Array{"x", x},
              spec, SavedActivation{data, bytes}, Workspace{workspace, workspace_bytes});
}

hot_status hot_decompress_activation(const hot_context* context, const hot_saved* saved,
                                     int64_t first, int64_t last, const hot_spec* spec,
                                     const hot_tensor* out) {
  return run("decompress_activation", decompress_activation, context,
             Given<hot_saved>{"saved", saved}, first, last, spec, Array{"out", out});
}

hot_status hot_quantized_weight_bytes(int64_t out_features, int64_t in_features,
                                      const hot_spec* spec, size_t* bytes) {
  return fill("quantized_weight_bytes", "bytes", bytes, quantized_weight_bytes, out_features,
              in_features, spec);
}

hot_status hot_quantize_weight_workspace(const hot_context* context, int64_t out_features,
                                         int64_t in_features, const hot_spec* spec, size_t* bytes) {
  return fill("quantize_weight_workspace", "bytes", bytes, quantize_weight_workspace, context,
              out_features, in_features, spec);
}

hot_status hot_quantize_weight(const hot_context* context, const hot_tensor* w,
                               const hot_spec* spec, void* data, size_t bytes, void* workspace,
                               size_t workspace_bytes, hot_weight* weight) {
  return fill("quantize_weight", "weight", weight, quantize_weight, context, Array{"w", w}, spec,
              QuantizedWeight{data, bytes}, Workspace{workspace, workspace_bytes});
}

hot_status hot_backward_linear_workspace(const hot_context* context, int64_t tokens,
                                         int64_t out_features, int64_t in_features,
                                         const hot_spec* spec, int32_t need_gx, int32_t need_gw,
                                         size_t* bytes) {
  return fill("backward_linear_workspace", "bytes", bytes, backward_linear_workspace, context,
              LinearShape{tokens, out_features, in_features}, spec, need_gx != 0, need_gw != 0);
}

hot_status hot_backward_linear(const hot_context* context, const hot_tensor* gy,
                               const hot_tensor* w, const hot_saved* saved, const hot_spec* spec,
                               const hot_gradients* out, void* workspace, size_t workspace_bytes) {
  return backward(context, gy, OptionalArray{{"w", w}}, saved, spec, out,
                  {workspace, workspace_bytes});
}

hot_status hot_backward_linear_quantized(const hot_context* context, const hot_tensor* gy,
                                         const hot_weight* weight, const hot_saved* saved,
                                         const hot_spec* spec, const hot_gradients* out,
                                         void* workspace, size_t workspace_bytes) {
  return backward(context, gy, weight, saved, spec, out, {workspace, workspace_bytes});
}

hot_status hot_forward_supported(const hot_context* context, int64_t tokens, int64_t out_features,
                                 int64_t in_features, const hot_forward_spec* spec) {
  return run(
      "forward_supported", [](const auto&... args) { check_supported(forward_supported(args...)); },
      context, LinearShape{tokens, out_features, in_features}, spec);
}

hot_status hot_forward_weight_bytes(int64_t out_features, int64_t in_features,
                                    const hot_forward_spec* spec, size_t* bytes) {
  return fill("forward_weight_bytes", "bytes", bytes, forward_weight_bytes, out_features,
              in_features, spec);
}

hot_status hot_quantize_forward_weight(const hot_context* context, const hot_tensor* w,
                                       const hot_forward_spec* spec, void* data, size_t bytes,
                                       hot_weight* weight) {
  return fill("quantize_forward_weight", "weight", weight, quantize_forward_weight, context,
              Array{"w", w}, spec, QuantizedWeight{data, bytes});
}

hot_status hot_forward_linear_workspace(const hot_context* context, int64_t tokens,
                                        int64_t out_features, int64_t in_features,
                                        const hot_forward_spec* spec, int32_t quantized_weight,
                                        size_t* bytes) {
  return fill("forward_linear_workspace", "bytes", bytes, forward_linear_workspace, context,
              LinearShape{tokens, out_features, in_features}, spec, quantized_weight != 0, false);
}

hot_status hot_forward_linear(const hot_context* context, const hot_tensor* x, const hot_tensor* w,
                              const hot_tensor* bias, const hot_forward_spec* spec,
                              const hot_tensor* y, void* workspace, size_t workspace_bytes) {
  return forward(context, Array{"x", x}, Array{"w", w}, bias, spec, y,
                 {workspace, workspace_bytes});
}

hot_status hot_forward_linear_quantized(const hot_context* context, const hot_tensor* x,
                                        const hot_weight* weight, const hot_tensor* bias,
                                        const hot_forward_spec* spec, const hot_tensor* y,
                                        void* workspace, size_t workspace_bytes) {
  return forward(context, Array{"x", x}, Given<hot_weight>{"weight", weight}, bias, spec, y,
                 {workspace, workspace_bytes});
}

hot_status hot_forward_input_bytes(int64_t tokens, int64_t in_features,
                                   const hot_forward_spec* spec, size_t* bytes) {
  return fill("forward_input_bytes", "bytes", bytes, forward_input_bytes, tokens, in_features,
              spec);
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
    const Context& c = call(context);
    const ConstTensorView from = call(Array{"x", x});
    const ConstTensorView powers = call(OptionalArray{{"exponents", exponents}});
    const ForwardLinearSpec forward_spec = call(spec);
    if (kept == nullptr) {
      return write_result(input,
                          quantize_forward_input(c, from, forward_spec, {data, bytes}, powers));
    }
    call.check("saved", saved);
    const ForwardInput result =
        quantize_forward_input(c, from, forward_spec, {data, bytes}, call(kept, "kept"),
                               {saved_data, saved_bytes}, {workspace, workspace_bytes}, powers);
    write_result(input, result.quantized);
    write_result(saved, result.saved);
  });
}

hot_status hot_forward_linear_input_workspace(const hot_context* context, int64_t tokens,
                                              int64_t out_features, int64_t in_features,
                                              const hot_forward_spec* spec,
                                              int32_t quantized_weight, size_t* bytes) {
  return fill("forward_linear_workspace", "bytes", bytes, forward_linear_workspace, context,
              LinearShape{tokens, out_features, in_features}, spec, quantized_weight != 0, true);
}

hot_status hot_forward_linear_input(const hot_context* context, const hot_input* x,
                                    const hot_tensor* w, const hot_weight* weight,
                                    const hot_tensor* bias, const hot_forward_spec* spec,
                                    const hot_tensor* y, void* workspace, size_t workspace_bytes) {
  const Workspace scratch{workspace, workspace_bytes};
  if ((w == nullptr) == (weight == nullptr)) {
    return guarded("forward_linear", [&](const Call& call) {
      invalid(call.name, "w and weight are both ", w == nullptr ? "null" : "given",
              "; expected one of them");
    });
  }
  if (weight != nullptr) return forward(context, x, weight, bias, spec, y, scratch);
  return forward(context, x, Array{"w", w}, bias, spec, y, scratch);
}

hot_status hot_weight_int4_bytes(int64_t out_features, int64_t in_features,
                                 const hot_forward_spec* spec, int32_t group, size_t* bytes) {
  return fill("weight_int4_bytes", "bytes", bytes, weight_int4_bytes, out_features, in_features,
              Int4{spec, group});
}

hot_status hot_quantize_weight_int4(const hot_context* context, const hot_tensor* w,
                                    const hot_tensor* exponents, const hot_forward_spec* spec,
                                    int32_t group, void* data, size_t bytes, hot_weight* weight) {
  return fill("quantize_weight_int4", "weight", weight, quantize_weight_int4, context,
              Array{"w", w}, OptionalArray{{"exponents", exponents}}, Int4{spec, group},
              QuantizedWeight{data, bytes});
}

hot_status hot_expand_weight_int4(const hot_context* context, const hot_weight* weight,
                                  const hot_forward_spec* spec, int32_t group, void* data,
                                  size_t bytes, hot_weight* expanded) {
  return fill("expand_weight_int4", "expanded", expanded, expand_weight_int4, context,
              Given<hot_weight>{"weight", weight}, Int4{spec, group}, QuantizedWeight{data, bytes});
}

hot_status hot_dequantize_weight(const hot_context* context, const hot_weight* weight,
                                 const hot_forward_spec* spec, const hot_tensor* exponents,
                                 const hot_tensor* out) {
  return run("dequantize_weight", dequantize_weight, context, weight, spec, Array{"out", out},
             OptionalArray{{"exponents", exponents}});
}

}  // extern "C"
