// Operators of torch in C++, by the C interface that torch keeps stable (2.10 and newer), without
// its headers.
//
// The operator NAME computes the results of the Python operator NAME_python, in a third of the
// host's time. It passes calls on to that one: the first with a configuration, a stream or codes of
// a frozen weight, unusual dimensions, and every error. Errors therefore are Python's.
#include <dlfcn.h>
#include <nanobind/stl/string.h>

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>

#include "views.h"

namespace hotpy {
namespace {

using Word = std::uint64_t;  // torch's StableIValue: an argument or a result
using Handle = void*;        // a tensor, a text or a library
using Int = std::int32_t;
using Sizes = const std::int64_t*;

// Version of the interface, and numbers of torch that its files contain.
constexpr Word version = Word{2} << 56 | Word{10} << 48;
constexpr Int cuda = 1, u8 = 0, i8 = 1, i64 = 4, f16 = 5, f32 = 6, bf16 = 15;

#define HOT_SHIM(F)                                                                    \
  F(aoti_torch_grad_mode_is_enabled, bool())                                           \
  F(aoti_torch_get_dim, int(Handle, std::int64_t*))                                    \
  F(aoti_torch_get_sizes, int(Handle, Sizes*))                                         \
  F(aoti_torch_get_strides, int(Handle, Sizes*))                                       \
  F(aoti_torch_get_dtype, int(Handle, Int*))                                           \
  F(aoti_torch_get_device_type, int(Handle, Int*))                                     \
  F(aoti_torch_get_device_index, int(Handle, Int*))                                    \
  F(aoti_torch_get_data_ptr, int(Handle, void**))                                      \
  F(aoti_torch_empty_strided, int(std::int64_t, Sizes, Sizes, Int, Int, Int, Handle*)) \
  F(aoti_torch_new_tensor_handle, int(Handle, Handle*))                                \
  F(aoti_torch_delete_tensor_object, int(Handle))                                      \
  F(torch_string_c_str, int(Handle, const char**))                                     \
  F(torch_delete_string, int(Handle))                                                  \
  F(torch_get_num_threads, int(std::uint32_t*))                                        \
  F(torch_call_dispatcher, int(const char*, const char*, Word*, Word))                 \
  F(aoti_torch_library_init_impl,                                                      \
    int(const char*, const char*, const char*, std::uint32_t, Handle*))                \
  F(torch_library_impl, int(Handle, const char*, void (*)(Word*, Word, Word), Word))

struct Shim {
#define HOT_MEMBER(name, ...) std::add_pointer_t<__VA_ARGS__> name;
  HOT_SHIM(HOT_MEMBER)
#undef HOT_MEMBER
} shim;
int (*stream_of)(Int device, void** stream) = nullptr;  // null without CUDA

struct Decline {};  // thrown where the Python operator takes the call
void require(bool condition) {
  if (!condition) throw Decline{};
}
void check(int error) { require(error == 0); }

struct Config {
  hot::BackwardLinearSpec spec;
  hot::ForwardLinearSpec forward;
  bool int8;
};
// Codes of a frozen weight that Python has found intact.
struct Intact {
  const void* data;
  std::int64_t version;
  Sizes exponents;
};
struct Tables {
  std::mutex mutex;
  std::map<std::string, Config, std::less<>> configs;  // never erased
  std::map<std::pair<Int, std::uintptr_t>, hot::Context> contexts;
  std::map<Sizes, Intact> intact;  // by Tensor::identity
};
Tables* tables = new Tables;
thread_local bool unknown = false;

// A table's entry; that it is missing is noted.
template <class Table, class Key>
auto& entry_of(Table& table, const Key& key) {
  const auto found = table.find(key);
  unknown = unknown || found == table.end();
  require(found != table.end());
  return found->second;
}

struct Delete {
  void operator()(Handle handle) const { shim.aoti_torch_delete_tensor_object(handle); }
};
using Owned = std::unique_ptr<void, Delete>;

// An argument, which may be missing, or with `owned` a result.
struct Tensor {
  Handle handle;
  Owned owned;
  Int dtype = u8, type = 0, device = 0;
  Sizes identity = nullptr;  // where torch keeps the sizes, which no other living tensor shares
  hot::TensorView view{};

  explicit Tensor(Handle given, Owned owner = {}) : handle(given), owned(std::move(owner)) {
    if (handle == nullptr) return;
    std::int64_t dims = 0;
    Sizes strides = nullptr;
    check(shim.aoti_torch_get_dim(handle, &dims));
    require(dims <= hot::max_dims);
    check(shim.aoti_torch_get_sizes(handle, &identity));
    check(shim.aoti_torch_get_strides(handle, &strides));
    check(shim.aoti_torch_get_data_ptr(handle, &view.data));
    check(shim.aoti_torch_get_dtype(handle, &dtype));
    check(shim.aoti_torch_get_device_type(handle, &type));
    check(shim.aoti_torch_get_device_index(handle, &device));
    view.ndim = static_cast<int>(dims);
    for (int i = 0; i < view.ndim; ++i) {
      view.shape[i] = identity[i];
      view.stride[i] = identity[i] > 1 ? strides[i] : 1;  // as in torch's capsules
    }
    if (type == cuda) view.device = {hot::Device::Type::cuda, device};
    view.dtype = dtype == f32    ? hot::DType::f32
                 : dtype == f16  ? hot::DType::f16
                 : dtype == bf16 ? hot::DType::bf16
                 : dtype == i8   ? hot::DType::i8
                                 : hot::DType::i4x2;
    require(view.dtype != hot::DType::i4x2 || dtype == u8 || dtype == i64);
  }
  std::int64_t last() const { return view.shape[view.ndim - 1]; }
  std::int64_t tokens() const {
    std::int64_t count = 1;
    for (int i = 0; i + 1 < view.ndim; ++i) count *= view.shape[i];
    return count;
  }
  bool contiguous() const {
    std::int64_t stride = 1;
    for (int i = view.ndim; i-- > 0; stride *= view.shape[i]) {
      if (view.shape[i] > 1 && view.stride[i] != stride) return false;
    }
    return true;
  }
  bool beside(const Tensor& other) const { return type == other.type && device == other.device; }
  std::size_t bytes(const Tensor& x) const {
    require(dtype == u8 && view.ndim == 1 && contiguous() && view.data != nullptr && beside(x));
    return static_cast<std::size_t>(view.shape[0]);
  }
  hot::Key key(const Tensor& x) const {  // of a seed, which kernels read on CUDA
    require(dtype == i64 && view.ndim == 0 && view.data != nullptr && (type != cuda || beside(x)));
    const auto* const seed = static_cast<const std::uint64_t*>(view.data);
    return type == cuda ? hot::Key{0, 0, 0, seed} : hot::Key{0, *seed, 0, nullptr};
  }
};
using Tensors = std::vector<Tensor>;

Handle handle_of(Word word) { return reinterpret_cast<Handle>(word); }
Word word_of(Handle handle) { return reinterpret_cast<Word>(handle); }
Tensor optional(Word word) {
  return Tensor(word == 0 ? nullptr : handle_of(*reinterpret_cast<const Word*>(word)));
}
std::string_view text_of(Word word) {
  const char* text = nullptr;
  check(shim.torch_string_c_str(handle_of(word), &text));
  return text;
}

// A new contiguous tensor on the device of `like`.
Tensor made(const Tensor& like, Int dtype, const std::vector<std::int64_t>& sizes) {
  std::vector<std::int64_t> strides(sizes.size(), 1);
  for (std::size_t i = sizes.size(); i-- > 1;) {
    strides[i - 1] = strides[i] * std::max<std::int64_t>(sizes[i], 1);
  }
  Handle handle = nullptr;
  check(shim.aoti_torch_empty_strided(static_cast<std::int64_t>(sizes.size()), sizes.data(),
                                      strides.data(), dtype, like.type, like.device, &handle));
  return Tensor(handle, Owned(handle));
}
Tensor made(const Tensor& like, std::size_t bytes) {
  return made(like, u8, {static_cast<std::int64_t>(bytes)});
}

// Calls an operator of torch with one result.
Tensor call(const char* name, const char* overload, std::array<Word, 5> stack) {
  check(shim.torch_call_dispatcher(name, overload, stack.data(), version));
  const Handle result = handle_of(stack[0]);
  return Tensor(result, Owned(result));
}

// Another handle of a tensor, for an operator's argument.
Word again(const Tensor& tensor) {
  Handle copy = nullptr;
  check(shim.aoti_torch_new_tensor_handle(tensor.handle, &copy));
  return word_of(copy);
}

// The tensor, or a contiguous copy.
Tensor dense(Tensor tensor) {
  constexpr Word contiguous_format = 0;
  if (tensor.contiguous()) return tensor;
  return call("aten::contiguous", "", {again(tensor), contiguous_format});
}

const Config& config_of(Word word) {
  const std::lock_guard<std::mutex> lock(tables->mutex);
  return entry_of(tables->configs, text_of(word));
}

hot::Context context_of(const Tensor& x) {
  std::uint32_t threads = 0;
  void* stream = nullptr;
  if (x.type == cuda) {
    require(stream_of != nullptr);
    check(stream_of(x.device, &stream));
  } else {
    check(shim.torch_get_num_threads(&threads));
  }
  const std::lock_guard<std::mutex> lock(tables->mutex);
  return x.type == cuda ? entry_of(tables->contexts, std::pair(x.device, word_of(stream)))
                        : entry_of(tables->contexts, std::pair(Int{-1}, Word{threads}));
}

// Scratch of a call on the device of `like`: from torch on CUDA, from the thread on the CPU.
struct Space {
  template <class Size>
  Space(const hot::Context& context, const Tensor& like, const Size& size)
      : kept(context, Out(), size) {
    const std::size_t needed = like.type == cuda ? size() : 0;
    if (needed > 0) memory.emplace(made(like, needed));
    if (memory) lent = {memory->view.data, needed};
  }
  const hot::Workspace& get() const { return memory ? lent : kept.get(); }

  Scratch kept;
  std::optional<Tensor> memory;
  hot::Workspace lent;
};

// Frees arguments by kind: t tensor, o tensor or none, s text, d dtype or none, - number.
void free_arguments(const Word* stack, const char* kinds) {
  for (; *kinds != 0; ++kinds, ++stack) {
    const Handle value = handle_of(*stack);
    if (*kinds == 't') Delete()(value);
    if (*kinds == 's') shim.torch_delete_string(value);
    if ((*kinds != 'o' && *kinds != 'd') || value == nullptr) continue;
    const std::unique_ptr<Word> inner(static_cast<Word*>(value));
    if (*kinds == 'o') Delete()(handle_of(*inner));
  }
}

// ---- codes of frozen weights ----

std::int64_t version_of(const Tensor& tensor) {
  Word stack[] = {again(tensor)};
  check(shim.torch_call_dispatcher("aten::_version", "", stack, version));
  return static_cast<std::int64_t>(stack[0]);
}

// A frozen weight, whose `fields` stand behind the arguments of an operator. Declines codes that
// have changed since Python has checked them.
struct Frozen {
  hot::ForwardLinearSpec spec;
  std::int64_t rows, columns;
  Int dtype = u8;  // that the codes stand for
  Codes codes{};
  hot::ConstTensorView exponents;  // of INT4: behind its codes

  Frozen(const Tensor& x, const Tensor& held, const Word* fields)
      : spec{static_cast<int>(fields[0])},
        rows(static_cast<std::int64_t>(fields[1])),
        columns(static_cast<std::int64_t>(fields[2])) {
    require(fields[3] != 0 && (fields[4] == 8 || fields[4] == 4));
    dtype = static_cast<Int>(*reinterpret_cast<const Word*>(fields[3]));
    const Tensor powers = optional(fields[5]);
    Intact seen{};
    {
      const std::lock_guard<std::mutex> lock(tables->mutex);
      const auto found = tables->intact.find(held.identity);
      if (found != tables->intact.end()) seen = found->second;
    }
    require(seen.data != nullptr && seen.data == held.view.data &&
            seen.version == version_of(held) &&
            (powers.handle == nullptr || seen.exponents == powers.identity));
    const hot::WeightInt4Spec int4{spec};
    const bool small = fields[4] == 4;
    std::size_t size = small ? hot::weight_int4_bytes(rows, columns, int4)
                             : hot::forward_weight_bytes(rows, columns, spec);
    codes = {{held.view.data, size}, rows, columns, spec, small ? int4.group : 0};
    if (small) {
      size = (size + 15) / 16 * 16;
      hot::TensorView view{};
      view.data = static_cast<std::int8_t*>(held.view.data) + size;
      view.dtype = hot::DType::i8;
      view.device = held.view.device;
      view.ndim = 1;
      view.shape[0] = columns;
      view.stride[0] = 1;
      exponents = view;
      size += static_cast<std::size_t>(columns);
    }
    require(held.bytes(x) >= size);
  }
};

// Notes that a frozen weight's codes are intact; returns their key for torch_forget_codes.
void know_codes(Word* stack, Word, Word) {
  Sizes key = nullptr;
  try {
    const Tensor codes(handle_of(stack[0])), exponents = optional(stack[1]);
    const Intact seen{codes.view.data, version_of(codes), exponents.identity};
    const std::lock_guard<std::mutex> lock(tables->mutex);
    tables->intact.insert_or_assign(key = codes.identity, seen);
  } catch (const Decline&) {
  }
  free_arguments(stack, "to");
  stack[0] = reinterpret_cast<Word>(key);
}

// ---- operators ----

// A new seed on the device of x.
Tensor drawn(const Tensor& x) {
  constexpr Word seeds = 0x7FFF'FFFF'FFFF'FFFF;
  const Handle empty = made(x, i64, {}).owned.release();
  return call("aten::random_", "to", {word_of(empty), seeds});
}

// x of an operator, whose leading dimensions libhot can see as one.
Tensor collapsible(Word word) {
  Tensor x(handle_of(word));
  require(x.view.ndim >= 2);
  return x.view.ndim > 2 ? dense(std::move(x)) : std::move(x);
}

Tensors draw_seed(const Word* in) {
  Tensors out;
  out.push_back(drawn(Tensor(handle_of(in[0]))));
  return out;
}

Tensors forward_input(const Word* in) {
  const hot::ForwardLinearSpec& spec = config_of(in[1]).forward;
  const Tensor x = collapsible(in[0]), exponents = optional(in[2]);
  const hot::Context context = context_of(x);
  Tensors out;
  out.push_back(made(x, hot::forward_input_bytes(x.tokens(), x.last(), spec)));
  hot::quantize_forward_input(context, x.view, spec, {out[0].view.data, out[0].bytes(x)},
                              exponents.view);
  return out;
}

// Compresses x with a new seed and, if `quantize`, quantises it for the product, too.
Tensors compressed(const Word* in, bool quantize) {
  const Config& config = config_of(in[1]);
  const Tensor x = collapsible(in[0]);
  const std::int64_t tokens = x.tokens(), width = x.last();
  hot::Context context = context_of(x);
  Tensors out;
  if (quantize) out.push_back(made(x, hot::forward_input_bytes(tokens, width, config.forward)));
  out.push_back(made(x, hot::saved_layout(tokens, width, config.spec).bytes));
  const hot::QuantizedInput codes{out[0].view.data, out[0].bytes(x)};
  const hot::SavedActivation saved{out.back().view.data, out.back().bytes(x)};
  const Space space(context, x, [&] {
    return hot::compress_activation_workspace(context, tokens, width, config.spec);
  });
  out.push_back(drawn(x));
  context = context.with_key(out.back().key(x));
  if (quantize) {
    hot::quantize_forward_input(context, x.view, config.forward, codes, config.spec, saved,
                                space.get());
  } else {
    hot::compress_activation(context, x.view, config.spec, saved, space.get());
  }
  return out;
}

// F.linear in the dtype of x.
Tensor plain_product(const Tensor& x, const Tensor& w, const Tensor& bias) {
  const auto argument = [&](const Tensor& tensor) {
    if (tensor.dtype == x.dtype) return again(tensor);
    const auto dtype = static_cast<Word>(x.dtype);
    return word_of(call("aten::to", "dtype", {again(tensor), dtype}).owned.release());
  };
  const Word matrix = argument(w);
  const Word added = bias.handle == nullptr ? 0 : word_of(new Word(argument(bias)));
  return call("aten::linear", "", {argument(x), matrix, added});
}

Tensors product(const Word* in) {
  require(!shim.aoti_torch_grad_mode_is_enabled());
  const Tensor x(handle_of(in[0])), w(handle_of(in[1])), bias = optional(in[2]);
  const Config& config = config_of(in[5]);
  Tensors out;
  if (!config.int8) {
    require(in[7] == 0);  // the weight is not frozen
    out.push_back(dense(plain_product(x, w, bias)));
    return out;
  }
  const Tensor codes = optional(in[6]);
  require(codes.handle != nullptr && x.view.ndim >= 2);
  std::optional<Frozen> frozen;
  if (in[7] != 0) frozen.emplace(x, w, in + 7);
  require(frozen ? in[7] == static_cast<Word>(config.forward.hadamard_block) : w.view.ndim == 2);
  const hot::LinearShape shape{x.tokens(), frozen ? frozen->rows : w.view.shape[0], x.last()};
  const hot::Context context = context_of(x);
  std::vector<std::int64_t> sizes(x.view.shape, x.view.shape + x.view.ndim);
  sizes.back() = shape.out_features;
  out.push_back(made(x, x.dtype, sizes));
  const Space space(context, x, [&] {
    return hot::forward_linear_workspace(context, shape, config.forward, frozen.has_value(), true) +
           (frozen ? frozen->codes.expanded() : 0);
  });
  const hot::ConstQuantizedInput input{codes.view.data, codes.bytes(x), shape.tokens,
                                       shape.in_features,
                                       hot::forward_input_format(config.forward)};
  hot::Workspace rest = space.get();
  if (frozen) {
    hot::forward_linear(context, input, frozen->codes.in_int8(context, rest), bias.view,
                        config.forward, out[0].view, rest);
  } else {
    hot::forward_linear(context, input, w.view, bias.view, config.forward, out[0].view, rest);
  }
  return out;
}

Tensors backward_linear(const Word* in) {
  require(!shim.aoti_torch_grad_mode_is_enabled());
  const Tensor gy(handle_of(in[0])), kept = optional(in[2]);
  Tensor w = optional(in[1]);
  const Tensor saved_seed = optional(in[3]), seed = optional(in[4]);
  const Config& config = config_of(in[5]);
  require(gy.view.ndim == 2 && seed.handle != nullptr);
  const hot::LinearShape shape{gy.tokens(), gy.last(), static_cast<std::int64_t>(in[6])};
  const auto [L, O, I] = shape;
  const hot::Context context = context_of(gy).with_key(seed.key(gy));
  if (in[8] != 0 && w.handle != nullptr) {
    const Frozen frozen(gy, w, in + 8);
    require(frozen.dtype == f32 || frozen.dtype == f16 || frozen.dtype == bf16);
    w = made(gy, frozen.dtype, {frozen.rows, frozen.columns});
    const Space space(context, gy, [&] { return frozen.codes.expanded(); });
    hot::Workspace rest = space.get();
    hot::dequantize_weight(context, frozen.codes.in_int8(context, rest), frozen.spec, w.view,
                           frozen.exponents);
  }
  Tensors out;
  std::array<hot::TensorView*, 3> wanted{};
  out.reserve(wanted.size());
  std::string_view names = text_of(in[7]);
  for (const auto& sizes : {std::vector{L, I}, std::vector{O, I}, std::vector{O}}) {
    const std::string_view name = names.substr(0, names.find(' '));
    const Int dtype = name == "float32" ? f32 : name == "float16" ? f16 : bf16;
    require(name == "None" || dtype != bf16 || name == "bfloat16");
    const std::size_t i = out.size();
    out.push_back(name == "None" ? made(gy, gy.dtype, {0}) : made(gy, dtype, sizes));
    if (name != "None") wanted[i] = &out[i].view;
    names.remove_prefix(std::min(name.size() + 1, names.size()));
  }
  hot::ConstSavedActivation saved;
  if (kept.handle != nullptr) {
    saved = {kept.view.data, kept.bytes(gy)};
    saved.key = (saved_seed.handle == nullptr ? seed : saved_seed).key(gy);
  }
  saved.tokens = L;
  saved.in_features = I;
  saved.format = hot::saved_format(config.spec);
  hot::BackwardOutputs outputs;
  outputs.gx = wanted[0];
  outputs.gw = wanted[1];
  outputs.gb = wanted[2];
  const Space space(context, gy, [&] {
    return hot::backward_linear_workspace(context, shape, config.spec, wanted[0] != nullptr,
                                          wanted[1] != nullptr);
  });
  hot::backward_linear(context, gy.view, w.view, saved, config.spec, outputs, space.get());
  return out;
}

struct Operator {
  const char* name;
  const char* kinds;  // of arguments (free_arguments)
  Tensors (*run)(const Word*);
};
constexpr Operator operators[] = {
    {"draw_seed", "t", &draw_seed},
    {"forward_input", "tso", &forward_input},
    {"compress", "ts", [](const Word* in) { return compressed(in, false); }},
    {"quantize_input", "ts", [](const Word* in) { return compressed(in, true); }},
    {"product", "ttoooso---d-o", &product},
    {"backward_linear", "toooos-s---d-o", &backward_linear},
};

template <std::size_t index>
void boxed(Word* stack, Word, Word) {
  constexpr const Operator& op = operators[index];
  Tensors results;
  try {
    results = op.run(stack);
  } catch (const Decline&) {
  } catch (const std::exception&) {  // Python repeats it
  }
  if (results.empty()) {
    static const std::string python = std::string("hotcore::") + op.name + "_python";
    if (shim.torch_call_dispatcher(python.c_str(), "", stack, version) == 0) return;
    throw std::runtime_error(python + " failed");
  }
  free_arguments(stack, op.kinds);
  for (Tensor& result : results) *stack++ = word_of(result.owned.release());
}

template <std::size_t... index>
void add_operators(Handle library, std::index_sequence<index...>) {
  (check(shim.torch_library_impl(library, operators[index].name, &boxed<index>, version)), ...);
}

// Registers the operators; false where this process has no torch with the interface.
bool add_torch() try {
  void* const cpu = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  void* const gpu = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
#define HOT_FIND(name, ...)                                      \
  shim.name = reinterpret_cast<std::add_pointer_t<__VA_ARGS__>>( \
      cpu == nullptr ? nullptr : dlsym(cpu, #name));             \
  require(shim.name != nullptr);
  HOT_SHIM(HOT_FIND)
#undef HOT_FIND
  if (gpu != nullptr) {
    stream_of =
        reinterpret_cast<int (*)(Int, void**)>(dlsym(gpu, "aoti_torch_get_current_cuda_stream"));
  }
  for (const char* const device : {"CPU", "CUDA"}) {
    Handle library = nullptr;  // torch needs it until the process ends
    check(shim.aoti_torch_library_init_impl("hotcore", device, __FILE__, 1, &library));
    add_operators(library, std::make_index_sequence<std::size(operators)>());
    check(shim.torch_library_impl(library, "know_codes", &know_codes, version));
  }
  return true;
} catch (const Decline&) {
  return false;
}

}  // namespace

void bind_torch_ops(nb::module_& m) {
  using namespace nb::literals;
  m.def("torch_operators", &add_torch);
  // `handle` is the stream of a CUDA device, or the number of threads where `device` is -1.
  m.def(
      "torch_learn",
      [](const std::string& json, const Spec& spec, const hot::ForwardLinearSpec& forward,
         bool int8, const CoreContext& context, Int device, std::uintptr_t handle) {
        const std::lock_guard<std::mutex> lock(tables->mutex);
        tables->configs.insert({json, {spec.spec, forward, int8}});
        if (tables->contexts.size() >= 64) tables->contexts.clear();
        tables->contexts.insert_or_assign({device, handle}, context.context);
      },
      "json"_a, "spec"_a, "forward"_a, "int8"_a, "context"_a, "device"_a, "handle"_a);
  // Returns true if an operator of this thread lacked one of these since the last question.
  m.def("torch_unknown", [] { return std::exchange(unknown, false); });
  m.def("torch_forget_codes", [](std::uintptr_t key) {
    const std::lock_guard<std::mutex> lock(tables->mutex);
    tables->intact.erase(reinterpret_cast<Sizes>(key));
  });
  // Forgets contexts. A forked child must not wait for a lock of its parent's threads.
  m.def(
      "torch_forget",
      [](bool forked) {
        if (forked) tables = new Tables;
        const std::lock_guard<std::mutex> lock(tables->mutex);
        tables->contexts.clear();
      },
      "forked"_a = false);
}

}  // namespace hotpy
