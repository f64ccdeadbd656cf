// Operators of torch in C++, by the C interface that torch keeps stable (2.10 and newer). None of
// torch's headers is needed.
//
// The operator NAME computes the results of the Python operator NAME_python, in a third of the
// host's time. It calls that one, before it has written anything, for all that it does not handle:
// a configuration or stream that is new to it, a frozen weight, a tensor with other dimensions, and
// every bad argument. Errors therefore are Python's.
#include "torch_ops.h"

#include <array>
#include <cstring>
#include <functional>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "views.h"

namespace hotpy {
namespace {

using Handle = struct TensorOpaque*;
using Text = struct StringOpaque*;
using Library = struct LibraryOpaque*;
using Word = std::uint64_t;  // torch's StableIValue: an argument or a result of an operator
using Sizes = const std::int64_t*;
using Boxed = void (*)(Word* stack, Word arguments, Word results);

// Version of the interface: its Words have the layout of torch 2.10.
constexpr Word version = Word{2} << 56 | Word{10} << 48;

#define HOT_SHIM(F)                                                              \
  F(bool, aoti_torch_grad_mode_is_enabled, ())                                   \
  F(int, aoti_torch_dtype_float32, ())                                           \
  F(int, aoti_torch_dtype_float16, ())                                           \
  F(int, aoti_torch_dtype_bfloat16, ())                                          \
  F(int, aoti_torch_dtype_uint8, ())                                             \
  F(int, aoti_torch_dtype_int64, ())                                             \
  F(int, aoti_torch_device_type_cuda, ())                                        \
  F(int, aoti_torch_get_dim, (Handle, std::int64_t*))                            \
  F(int, aoti_torch_get_sizes, (Handle, Sizes*))                                 \
  F(int, aoti_torch_get_strides, (Handle, Sizes*))                               \
  F(int, aoti_torch_get_dtype, (Handle, std::int32_t*))                          \
  F(int, aoti_torch_get_device_type, (Handle, std::int32_t*))                    \
  F(int, aoti_torch_get_device_index, (Handle, std::int32_t*))                   \
  F(int, aoti_torch_get_data_ptr, (Handle, void**))                              \
  F(int, aoti_torch_empty_strided,                                               \
    (std::int64_t, Sizes, Sizes, std::int32_t, std::int32_t, std::int32_t, Handle*)) \
  F(int, aoti_torch_new_tensor_handle, (Handle, Handle*))                        \
  F(int, aoti_torch_delete_tensor_object, (Handle))                              \
  F(int, torch_string_c_str, (Text, const char**))                               \
  F(int, torch_string_length, (Text, std::size_t*))                              \
  F(int, torch_delete_string, (Text))                                            \
  F(int, torch_get_num_threads, (std::uint32_t*))                                \
  F(int, torch_call_dispatcher, (const char*, const char*, Word*, Word))         \
  F(int, aoti_torch_library_init_impl,                                           \
    (const char*, const char*, const char*, std::uint32_t, Library*))            \
  F(int, torch_library_impl, (Library, const char*, Boxed, Word))                \
  F(int, aoti_torch_get_current_cuda_stream, (std::int32_t, void**))

#define HOT_MEMBER(result, name, arguments) result(*name) arguments = nullptr;
struct Shim {
  HOT_SHIM(HOT_MEMBER)
} shim;
#undef HOT_MEMBER

// The Python operator takes the call.
struct Decline {};

void check(int error) {
  if (error != 0) throw Decline{};
}
void require(bool condition) {
  if (!condition) throw Decline{};
}

struct Config {
  hot::BackwardLinearSpec spec;
  hot::ForwardLinearSpec forward;
  bool int8;
};

struct Tables {
  std::mutex mutex;
  std::map<std::string, Config, std::less<>> configs;  // never erased
  std::map<std::pair<int, std::uintptr_t>, hot::Context> contexts;
};
Tables* tables = new Tables;

thread_local std::string message;
thread_local bool unknown = false;

void require_known(bool known) {
  unknown = unknown || !known;
  require(known);
}

// A tensor of the caller, or with `owned` a new one.
struct Tensor {
  Handle handle = nullptr;
  bool owned = false;
  int dtype = 0, device_type = 0, device = 0;
  hot::TensorView view;

  explicit Tensor(Handle given, bool owned = false) : handle(given), owned(owned) {
    if (handle == nullptr) return;
    std::int64_t dims = 0;
    Sizes sizes = nullptr, strides = nullptr;
    check(shim.aoti_torch_get_dim(handle, &dims));
    require(dims <= hot::max_dims);
    check(shim.aoti_torch_get_sizes(handle, &sizes));
    check(shim.aoti_torch_get_strides(handle, &strides));
    check(shim.aoti_torch_get_data_ptr(handle, &view.data));
    check(shim.aoti_torch_get_dtype(handle, &dtype));
    check(shim.aoti_torch_get_device_type(handle, &device_type));
    check(shim.aoti_torch_get_device_index(handle, &device));
    view.ndim = static_cast<int>(dims);
    for (int i = 0; i < view.ndim; ++i) {
      view.shape[i] = sizes[i];
      view.stride[i] = sizes[i] > 1 ? strides[i] : 1;  // as in torch's capsules
    }
    if (is_cuda()) view.device = {hot::Device::Type::cuda, device};
    using hot::DType;
    const std::pair<int, DType> dtypes[] = {{shim.aoti_torch_dtype_float32(), DType::f32},
                                            {shim.aoti_torch_dtype_float16(), DType::f16},
                                            {shim.aoti_torch_dtype_bfloat16(), DType::bf16},
                                            {shim.aoti_torch_dtype_uint8(), DType::i4x2}};
    for (const auto& [number, type] : dtypes) {
      if (dtype != number) continue;
      view.dtype = type;
      return;
    }
    require(dtype == shim.aoti_torch_dtype_int64());  // a seed
  }
  Tensor(Tensor&& other) noexcept { *this = std::move(other); }
  Tensor& operator=(Tensor&& other) noexcept {
    std::swap(handle, other.handle);
    std::swap(owned, other.owned);
    dtype = other.dtype;
    device_type = other.device_type;
    device = other.device;
    view = other.view;
    return *this;
  }
  ~Tensor() {
    if (owned && handle != nullptr) shim.aoti_torch_delete_tensor_object(handle);
  }

  bool is_cuda() const { return device_type == shim.aoti_torch_device_type_cuda(); }
  bool exists() const { return handle != nullptr; }
  std::int64_t last() const { return view.shape[view.ndim - 1]; }
  std::int64_t rows() const {
    std::int64_t count = 1;
    for (int i = 0; i + 1 < view.ndim; ++i) count *= view.shape[i];
    return count;
  }
  bool contiguous() const {
    std::int64_t stride = 1;
    for (int i = view.ndim; i-- > 0;) {
      if (view.shape[i] > 1 && view.stride[i] != stride) return false;
      stride *= view.shape[i];
    }
    return true;
  }
  hot::ConstTensorView read() const { return view; }
  std::size_t bytes() const {  // of a vector of bytes
    require(view.ndim == 1 && view.dtype == hot::DType::i4x2 && contiguous());
    return static_cast<std::size_t>(view.shape[0]);
  }
  // A key's offset: on CUDA kernels read it.
  hot::Key key() const {
    require(dtype == shim.aoti_torch_dtype_int64() && view.ndim == 0 && view.data != nullptr);
    const auto* const seed = static_cast<const std::uint64_t*>(view.data);
    return is_cuda() ? hot::Key{0, 0, 0, seed} : hot::Key{0, *seed, 0, nullptr};
  }
  Word release() {
    owned = false;
    return reinterpret_cast<Word>(handle);
  }
  // A second handle, for an operator's argument.
  Word again() const {
    Handle copy = nullptr;
    check(shim.aoti_torch_new_tensor_handle(handle, &copy));
    return reinterpret_cast<Word>(copy);
  }
};

// A new tensor on the device of `like`.
Tensor made(const Tensor& like, int dtype, std::initializer_list<std::int64_t> sizes) {
  std::array<std::int64_t, hot::max_dims> strides{};
  std::int64_t stride = 1;
  for (std::size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<std::int64_t>(sizes.begin()[i], 1);
  }
  Handle handle = nullptr;
  check(shim.aoti_torch_empty_strided(static_cast<std::int64_t>(sizes.size()), sizes.begin(),
                                      strides.data(), dtype, like.device_type, like.device,
                                      &handle));
  return Tensor(handle, true);
}

Tensor bytes(const Tensor& like, std::size_t size) {
  return made(like, shim.aoti_torch_dtype_uint8(), {static_cast<std::int64_t>(size)});
}

// Scratch on the device of `like`: on CUDA memory of torch, on the CPU that of the thread.
class Space {
 public:
  template <class Size>
  Space(const hot::Context& context, const Tensor& like, const Size& size)
      : scratch_(context, Out(), size) {
    const std::size_t needed = like.is_cuda() ? size() : 0;
    if (needed > 0) memory_.emplace(bytes(like, needed));
    if (needed > 0) workspace_ = {memory_->view.data, needed};
  }
  const hot::Workspace& get() const { return memory_ ? workspace_ : scratch_.get(); }

 private:
  Scratch scratch_;
  std::optional<Tensor> memory_;
  hot::Workspace workspace_;
};

// ---- arguments ----

Handle handle_of(Word word) { return reinterpret_cast<Handle>(word); }
const Word* optional_of(Word word) { return reinterpret_cast<const Word*>(word); }

Tensor tensor(Word word) { return Tensor(handle_of(word)); }
Tensor optional(Word word) { return Tensor(word == 0 ? nullptr : handle_of(*optional_of(word))); }

std::string_view text_of(Word word) {
  const Text text = reinterpret_cast<Text>(word);
  const char* data = nullptr;
  std::size_t length = 0;
  check(shim.torch_string_c_str(text, &data));
  check(shim.torch_string_length(text, &length));
  return {data, length};
}

int dtype_of(std::string_view name) {
  if (name == "float32") return shim.aoti_torch_dtype_float32();
  if (name == "float16") return shim.aoti_torch_dtype_float16();
  require(name == "bfloat16");
  return shim.aoti_torch_dtype_bfloat16();
}

const Config& config_of(Word word) {
  const std::lock_guard<std::mutex> lock(tables->mutex);
  const auto found = tables->configs.find(text_of(word));
  require_known(found != tables->configs.end());
  return found->second;
}

hot::Context context_of(const Tensor& x) {
  std::pair<int, std::uintptr_t> key{-1, 0};
  if (x.is_cuda()) {
    void* stream = nullptr;
    require(shim.aoti_torch_get_current_cuda_stream != nullptr);
    check(shim.aoti_torch_get_current_cuda_stream(x.device, &stream));
    key = {x.device, reinterpret_cast<std::uintptr_t>(stream)};
  } else {
    std::uint32_t threads = 0;
    check(shim.torch_get_num_threads(&threads));
    key.second = threads;
  }
  const std::lock_guard<std::mutex> lock(tables->mutex);
  const auto found = tables->contexts.find(key);
  require_known(found != tables->contexts.end());
  return found->second;
}

// Frees the arguments: t tensor, o optional tensor, k other optional, s text, - number.
void release(const Word* stack, const char* kinds) {
  for (; *kinds != 0; ++kinds, ++stack) {
    if (*kinds == 't') shim.aoti_torch_delete_tensor_object(handle_of(*stack));
    if (*kinds == 's') shim.torch_delete_string(reinterpret_cast<Text>(*stack));
    if ((*kinds != 'o' && *kinds != 'k') || *stack == 0) continue;
    const Word* const inner = optional_of(*stack);
    if (*kinds == 'o') shim.aoti_torch_delete_tensor_object(handle_of(*inner));
    delete inner;
  }
}

// Calls an operator of torch with one result.
Tensor call(const char* name, const char* overload, std::initializer_list<Word> arguments) {
  std::array<Word, 5> stack{};
  std::copy(arguments.begin(), arguments.end(), stack.begin());
  check(shim.torch_call_dispatcher(name, overload, stack.data(), version));
  return Tensor(handle_of(stack[0]), true);
}

// ---- operators ----

using Results = std::vector<Tensor>;

Results compressed(const Word* in, bool quantize) {
  const Tensor x = tensor(in[0]);
  const Config& config = config_of(in[1]);
  require(x.view.ndim == 2 || (x.view.ndim > 2 && x.contiguous()));
  const std::int64_t tokens = x.rows(), width = x.last();
  hot::Context context = context_of(x);
  Results out;
  if (quantize) {
    out.push_back(bytes(x, hot::forward_input_bytes(tokens, width, config.forward)));
  }
  out.push_back(bytes(x, hot::saved_layout(tokens, width, config.spec).bytes));
  const Space space(context, x, [&] {
    return hot::compress_activation_workspace(context, tokens, width, config.spec);
  });
  constexpr Word seeds = 0x7FFF'FFFF'FFFF'FFFF, no_generator = 0;
  Tensor empty = made(x, shim.aoti_torch_dtype_int64(), {});
  Tensor seed = call("aten::random_", "to", {empty.release(), seeds, no_generator});
  context = context.with_key(seed.key());
  const hot::SavedActivation saved{out.back().view.data, out.back().bytes()};
  if (quantize) {
    const hot::QuantizedInput codes{out[0].view.data, out[0].bytes()};
    hot::quantize_forward_input(context, x.read(), config.forward, codes, config.spec, saved,
                                space.get());
  } else {
    hot::compress_activation(context, x.read(), config.spec, saved, space.get());
  }
  out.push_back(std::move(seed));
  return out;
}

struct Compress {
  static constexpr const char *name = "compress", *python = "hotcore::compress_python",
                              *kinds = "ts";
  static Results run(const Word* in) { return compressed(in, false); }
};

struct QuantizeInput {
  static constexpr const char *name = "quantize_input", *python = "hotcore::quantize_input_python",
                              *kinds = "ts";
  static Results run(const Word* in) { return compressed(in, true); }
};

// F.linear in the dtype of x.
Tensor plain_product(const Tensor& x, const Tensor& w, const Tensor& bias) {
  const auto argument = [&](const Tensor& parameter) {
    if (parameter.dtype == x.dtype) return parameter.again();
    const auto dtype = static_cast<Word>(x.dtype);
    return call("aten::to", "dtype", {parameter.again(), dtype, 0, 0, 0}).release();
  };
  const Word matrix = argument(w);
  const Word added =
      bias.exists() ? reinterpret_cast<Word>(new Word(argument(bias))) : Word{0};
  return call("aten::linear", "", {x.again(), matrix, added});
}

struct Product {
  static constexpr const char *name = "product", *python = "hotcore::product_python",
                              *kinds = "ttooos" "o---k-o";
  static Results run(const Word* in) {
    require(in[7] == 0 && !shim.aoti_torch_grad_mode_is_enabled());  // the weight is not frozen
    const Tensor x = tensor(in[0]), w = tensor(in[1]), bias = optional(in[2]);
    const Tensor codes = optional(in[6]);
    const Config& config = config_of(in[5]);
    Results out;
    if (!config.int8) {
      out.push_back(plain_product(x, w, bias));
      require(out[0].contiguous());
      return out;
    }
    const int dims = x.view.ndim;
    require(codes.exists() && 2 <= dims && w.view.ndim == 2);
    const std::int64_t *const s = x.view.shape, tokens = x.rows(), width = x.last(),
                              features = w.view.shape[0];
    const hot::Context context = context_of(x);
    out.push_back(dims == 2   ? made(x, x.dtype, {s[0], features})
                  : dims == 3 ? made(x, x.dtype, {s[0], s[1], features})
                              : made(x, x.dtype, {s[0], s[1], s[2], features}));
    const Space space(context, x, [&] {
      return hot::forward_linear_workspace(context, {tokens, features, width}, config.forward,
                                           false, true);
    });
    const hot::ConstQuantizedInput input{codes.view.data, codes.bytes(), tokens, width,
                                         hot::forward_input_format(config.forward)};
    hot::forward_linear(context, input, w.read(), bias.read(), config.forward, out[0].view,
                        space.get());
    return out;
  }
};

struct BackwardLinear {
  static constexpr const char *name = "backward_linear",
                              *python = "hotcore::backward_linear_python",
                              *kinds = "toooos-s" "---k-o";
  static Results run(const Word* in) {
    require(in[8] == 0 && !shim.aoti_torch_grad_mode_is_enabled());
    const Tensor gy = tensor(in[0]), w = optional(in[1]), kept = optional(in[2]);
    const Tensor saved_seed = optional(in[3]), seed = optional(in[4]);
    const Config& config = config_of(in[5]);
    require(gy.view.ndim == 2 && seed.exists());
    const std::int64_t tokens = gy.view.shape[0], features = gy.view.shape[1],
                       width = static_cast<std::int64_t>(in[6]);
    const hot::Context context = context_of(gy).with_key(seed.key());
    Results out;
    std::array<bool, 3> wanted{};
    std::string_view names = text_of(in[7]);
    for (std::size_t i = 0; i < 3; ++i) {
      const std::string_view name = names.substr(0, names.find(' '));
      names.remove_prefix(std::min(name.size() + 1, names.size()));
      wanted[i] = name != "None";
      const int dtype = wanted[i] ? dtype_of(name) : gy.dtype;
      out.push_back(!wanted[i] ? made(gy, dtype, {0})
                    : i == 0   ? made(gy, dtype, {tokens, width})
                    : i == 1   ? made(gy, dtype, {features, width})
                               : made(gy, dtype, {features}));
    }
    hot::ConstSavedActivation saved;
    if (kept.exists()) {
      saved.data = kept.view.data;
      saved.bytes = kept.bytes();
      saved.key = (saved_seed.exists() ? saved_seed : seed).key();
      require(saved.data != nullptr);
    }
    saved.tokens = tokens;
    saved.in_features = width;
    saved.format = hot::saved_format(config.spec);
    const auto output = [&](std::size_t i) { return wanted[i] ? &out[i].view : nullptr; };
    hot::BackwardOutputs outputs;
    outputs.gx = output(0);
    outputs.gw = output(1);
    outputs.gb = output(2);
    const Space space(context, gy, [&] {
      return hot::backward_linear_workspace(context, {tokens, features, width}, config.spec,
                                            wanted[0], wanted[1]);
    });
    hot::backward_linear(context, gy.read(), w.read(), saved, config.spec, outputs, space.get());
    return out;
  }
};

template <class Operator>
void boxed(Word* stack, Word, Word) {
  Results results;
  try {
    results = Operator::run(stack);
  } catch (const Decline&) {
  } catch (const std::exception&) {
  }
  if (!results.empty()) {
    release(stack, Operator::kinds);
    for (Tensor& result : results) *stack++ = result.release();
    return;
  }
  message = "hotcore: the operator failed";
  if (shim.torch_call_dispatcher(Operator::python, "", stack, version) == 0) return;
  throw std::runtime_error(message);
}

template <class Operator>
void add(Library library) {
  if (shim.torch_library_impl(library, Operator::name, &boxed<Operator>, version) != 0) {
    throw std::runtime_error(std::string("torch refuses the operator ") + Operator::name);
  }
}

}  // namespace

std::vector<std::string> torch_symbols() {
#define HOT_NAME(result, name, arguments) #name,
  return {HOT_SHIM(HOT_NAME)};
#undef HOT_NAME
}

void torch_operators(const std::map<std::string, std::uintptr_t>& addresses) {
#define HOT_ADDRESS(result, name, arguments) \
  shim.name = reinterpret_cast<result(*) arguments>(addresses.at(#name));
  HOT_SHIM(HOT_ADDRESS)
#undef HOT_ADDRESS
  for (const char* const device : {"CPU", "CUDA"}) {
    Library library = nullptr;  // torch keeps it until the process ends
    if (shim.aoti_torch_library_init_impl("hotcore", device, __FILE__, 1, &library) != 0) {
      throw std::runtime_error("torch refuses a library of operators");
    }
    add<Compress>(library);
    add<QuantizeInput>(library);
    add<Product>(library);
    add<BackwardLinear>(library);
  }
}

void torch_learn(const std::string& json, const hot::BackwardLinearSpec& spec,
                 const hot::ForwardLinearSpec& forward, bool int8, const hot::Context& context,
                 int device, std::uintptr_t handle) {
  constexpr std::size_t most = 64;
  const std::lock_guard<std::mutex> lock(tables->mutex);
  tables->configs.insert({json, {spec, forward, int8}});
  if (tables->contexts.size() >= most) tables->contexts.clear();
  tables->contexts.insert_or_assign({device, handle}, context);
}

void torch_forget(bool forked) {
  if (forked) {
    tables = new Tables;
    return;
  }
  const std::lock_guard<std::mutex> lock(tables->mutex);
  tables->contexts.clear();
}

bool torch_unknown() { return std::exchange(unknown, false); }

void torch_error(const std::string& text) { message = text; }

}  // namespace hotpy
