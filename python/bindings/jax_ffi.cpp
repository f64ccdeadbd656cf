// Extension module hotcore._jax_ffi: XLA's handlers for hotcore.jax. A handler makes views of XLA's
// buffers, calls libhot once and returns its error. CPU and CUDA share the handlers and differ only
// in the context. XLA's headers define the calling convention (third_party/README.md).
#include <nanobind/stl/string_view.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "config_fields.h"
#include "views.h"
#include "xla/ffi/api/ffi.h"

namespace hotpy {

namespace ffi = xla::ffi;

// Sources of a call's context: on the CPU the settings from Python, on CUDA XLA's stream.
struct Cpu {
  hot::Context context() const;
};
struct Cuda {
  hot::Stream stream = nullptr;
  int device = 0;
  hot::Context context() const { return hot::Context::cuda(device, stream); }
};

}  // namespace hotpy

namespace xla::ffi {

template <>
struct CtxBinding<hotpy::Cpu> {
  using Ctx = hotpy::Cpu;
};
template <>
struct CtxBinding<hotpy::Cuda> {
  using Ctx = hotpy::Cuda;
};

// `Call` is a template argument, because its type's name depends on the version of the headers.
template <>
struct CtxDecoding<hotpy::Cpu> {
  using Type = hotpy::Cpu;
  template <class Call>
  static std::optional<Type> Decode(const XLA_FFI_Api* /*api*/, Call* /*call*/,
                                    DiagnosticEngine& /*diagnostic*/) {
    return Type{};
  }
};

template <>
struct CtxDecoding<hotpy::Cuda> {
  using Type = hotpy::Cuda;
  template <class Call>
  static std::optional<Type> Decode(const XLA_FFI_Api* api, Call* call,
                                    DiagnosticEngine& diagnostic) {
    const auto stream = CtxDecoding<PlatformStream<hot::Stream>>::Decode(api, call, diagnostic);
    const auto device = CtxDecoding<DeviceOrdinal>::Decode(api, call, diagnostic);
    if (!stream || !device) return std::nullopt;
    return Type{*stream, *device};
  }
};

}  // namespace xla::ffi

namespace hotpy {
namespace {

using Buffer = ffi::AnyBuffer;
using Output = ffi::Result<ffi::AnyBuffer>;

[[noreturn]] void invalid(const std::string& message) {
  throw hot::Error(hot::ErrorCode::invalid_argument, message);
}

// Threads and instruction set from hotcore.set_num_threads and set_isa, guarded by a lock because
// XLA calls from its own threads. A running call keeps its threads.
class CpuChoice {
 public:
  void set(int threads, std::optional<hot::Isa> isa) {
    const std::lock_guard<std::mutex> lock(mutex_);
    threads_ = threads;
    isa_ = isa;
    context_.reset();
  }
  hot::Context get() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!context_) {  // the first call starts the threads
      context_ = hot::Context::cpu(threads_);
      if (isa_) context_ = context_->with_isa(*isa_);
    }
    return *context_;
  }

 private:
  std::mutex mutex_;
  int threads_ = 0;
  std::optional<hot::Isa> isa_;
  std::optional<hot::Context> context_;
};

// Never destroyed, because XLA's threads may still call while the process ends.
CpuChoice& cpu_choice() {
  static CpuChoice& choice = *new CpuChoice;
  return choice;
}

hot::DType dtype_of(const Buffer& buffer, const char* name) {
  switch (buffer.element_type()) {
    case ffi::DataType::F32:
      return hot::DType::f32;
    case ffi::DataType::F16:
      return hot::DType::f16;
    case ffi::DataType::BF16:
      return hot::DType::bf16;
    default:
      invalid(std::string(name) + ": XLA's data type " +
              std::to_string(static_cast<int>(buffer.element_type())) +
              " is not one of float32, float16, bfloat16");
  }
}

// XLA's buffers are dense and row-major unless a handler asks for another layout.
template <class View>
View view(const Buffer& buffer, hot::Device device, const char* name) {
  const auto dims = buffer.dimensions();
  if (dims.size() > static_cast<std::size_t>(hot::max_dims)) {
    invalid(std::string(name) + ": " + std::to_string(dims.size()) + " dimensions");
  }
  View out;
  out.data = buffer.untyped_data();
  out.dtype = dtype_of(buffer, name);
  out.device = device;
  out.ndim = static_cast<int>(dims.size());
  std::int64_t stride = 1;
  for (int i = out.ndim - 1; i >= 0; --i) {
    out.shape[i] = dims[static_cast<std::size_t>(i)];
    out.stride[i] = stride;
    stride *= out.shape[i];
  }
  return out;
}

// View of an output, or none if it is empty: an empty output is not requested.
std::optional<hot::TensorView> wanted(Output& output, hot::Device device, const char* name) {
  if (output->element_count() == 0) return std::nullopt;
  return view<hot::TensorView>(*output, device, name);
}

// Scratch of a call: XLA's on CUDA. On the CPU `local`, because the size depends on the number of
// threads, which may have changed.
hot::Workspace workspace_of(const Scratch& local, Output& scratch) {
  if (local.get().data != nullptr) return local.get();
  return {scratch->untyped_data(), scratch->size_bytes()};
}

// Key whose counter is the seed (two words, low word first). The work reads it in place: nothing is
// copied from the device.
hot::Key key_of(const Buffer& seed) {
  if (seed.element_type() != ffi::DataType::U32 || seed.element_count() != 2) {
    invalid("seed: expected two uint32 words");
  }
  hot::Key key;
  key.counter = static_cast<const std::uint64_t*>(seed.untyped_data());
  return key;
}

// The single attribute of a call. With several, XLA's header assumes sorted names, which not every
// jaxlib provides.
template <class T>
T attribute(const ffi::Dictionary& attributes, const char* name) {
  const auto value = attributes.get<T>(name);
  if (!value.has_value()) invalid(std::string(name) + ": " + value.error().message());
  return *value;
}

// Reads all fields of HotConfig for the backward pass from the text "name=value;...".
hot::BackwardLinearSpec spec_of(const ffi::Dictionary& attributes) {
  using Spec = hot::BackwardLinearSpec;
  Spec spec;
  std::vector<std::string_view> missing;
  hot::detail::for_each_field(hot::detail::FieldsOf<Spec>{},
                              [&](const auto& row) { missing.emplace_back(row.name); });
  auto rest = attribute<std::string_view>(attributes, "config");
  while (!rest.empty()) {
    const std::string_view field = rest.substr(0, rest.find(';'));
    rest.remove_prefix(std::min(rest.size(), field.size() + 1));
    const std::string_view name = field.substr(0, field.find('='));
    const std::string_view value = field.substr(std::min(field.size(), name.size() + 1));
    hot::detail::with_field<Spec>(
        name, [&](const auto& row) { hot::detail::set_field_text(row, value, row.get(spec)); });
    missing.erase(std::remove(missing.begin(), missing.end(), name), missing.end());
  }
  if (!missing.empty()) invalid("config: no " + std::string(missing.front()));
  return spec;
}

ffi::ErrorCode code_of(hot::ErrorCode code) {
  switch (code) {
    case hot::ErrorCode::invalid_argument:
      return ffi::ErrorCode::kInvalidArgument;
    case hot::ErrorCode::unsupported:
      return ffi::ErrorCode::kUnimplemented;
    default:
      return ffi::ErrorCode::kInternal;
  }
}

// Exceptions must not reach XLA.
template <class Call>
ffi::Error guarded(const Call& call) {
  try {
    call();
    return ffi::Error::Success();
  } catch (const hot::Error& error) {
    return {code_of(error.code()), error.what()};
  } catch (const std::bad_alloc&) {
    return {ffi::ErrorCode::kResourceExhausted, "hotcore: out of memory"};
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
}

template <class Where>
ffi::Error compress_activation(Where where, ffi::Dictionary attributes, Buffer x, Buffer seed,
                               Output saved, Output scratch) {
  return guarded([&] {
    const hot::Context context = where.context().with_key(key_of(seed));
    const hot::BackwardLinearSpec spec = spec_of(attributes);
    const auto xv = view<hot::ConstTensorView>(x, context.device(), "x");
    const Scratch local(context, {}, [&] {
      return hot::compress_activation_workspace(context, xv.shape[0], xv.shape[1], spec);
    });
    hot::compress_activation(context, xv, spec, {saved->untyped_data(), saved->size_bytes()},
                             workspace_of(local, scratch));
  });
}

template <class Where>
ffi::Error backward_linear(Where where, ffi::Dictionary attributes, Buffer gy, Buffer w,
                           Buffer saved, Buffer seed, Output gx, Output gw, Output gb,
                           Output scratch) {
  return guarded([&] {
    const hot::Context context = where.context().with_key(key_of(seed));
    const hot::BackwardLinearSpec spec = spec_of(attributes);
    const hot::Device device = context.device();
    const auto gyv = view<hot::ConstTensorView>(gy, device, "gy");
    const auto gxv = wanted(gx, device, "gx");
    const auto gwv = wanted(gw, device, "gw");
    const auto gbv = wanted(gb, device, "gb");
    if (!gxv && !gwv && !gbv) return;  // only g_x is requested, and there are no tokens
    hot::ConstTensorView wv;
    if (gxv) wv = view<hot::ConstTensorView>(w, device, "w");
    hot::ConstSavedActivation xv;
    if (gwv) {
      xv = {saved.untyped_data(), saved.size_bytes(), gyv.shape[0],
            gwv->shape[1],        context.key(),      hot::saved_format(spec)};
    }
    hot::BackwardOutputs outputs;
    outputs.gx = gxv ? &*gxv : nullptr;
    outputs.gw = gwv ? &*gwv : nullptr;
    outputs.gb = gbv ? &*gbv : nullptr;
    const hot::LinearShape shape{gyv.shape[0], gyv.shape[1], gxv ? gxv->shape[1] : xv.in_features};
    const Scratch local(context, {}, [&] {
      return hot::backward_linear_workspace(context, shape, spec, gxv.has_value(), gwv.has_value());
    });
    hot::backward_linear(context, gyv, wv, xv, spec, outputs, workspace_of(local, scratch));
  });
}

// Handler of forward_linear. An empty bias means no bias.
template <class Where>
ffi::Error forward_linear(Where where, ffi::Dictionary attributes, Buffer x, Buffer w, Buffer bias,
                          Output y, Output scratch) {
  return guarded([&] {
    const hot::Context context = where.context();
    const hot::Device device = context.device();
    hot::ForwardLinearSpec spec;
    spec.hadamard_block = static_cast<int>(attribute<std::int64_t>(attributes, "forward_block"));
    const auto xv = view<hot::ConstTensorView>(x, device, "x");
    const auto wv = view<hot::ConstTensorView>(w, device, "w");
    hot::ConstTensorView bv;
    if (bias.element_count() != 0) bv = view<hot::ConstTensorView>(bias, device, "b");
    const auto yv = wanted(y, device, "y");
    if (!yv) return;
    const hot::LinearShape shape{xv.shape[0], wv.shape[0], xv.shape[1]};
    const Scratch local(context, {},
                        [&] { return hot::forward_linear_workspace(context, shape, spec, false); });
    hot::forward_linear(context, xv, wv, bv, spec, *yv, workspace_of(local, scratch));
  });
}

// XLA passes a function's parameters in their order.
template <auto function>
XLA_FFI_Error* handler(XLA_FFI_CallFrame* frame) {
  static const ffi::Ffi& bound =
      *ffi::Ffi::BindTo(function).release();  // never destroyed, as cpu_choice()
  return bound.Call(frame);
}

nb::capsule capsule(XLA_FFI_Handler* pointer) {
  return nb::capsule(reinterpret_cast<const void*>(pointer));
}

// Handlers by the name of the call, for one of JAX's platforms.
template <class Where>
nb::dict handlers() {
  nb::dict out;
  out["compress_activation"] = capsule(&handler<&compress_activation<Where>>);
  out["backward_linear"] = capsule(&handler<&backward_linear<Where>>);
  out["forward_linear"] = capsule(&handler<&forward_linear<Where>>);
  return out;
}

}  // namespace

hot::Context Cpu::context() const { return cpu_choice().get(); }

}  // namespace hotpy

NB_MODULE(_jax_ffi, module) {
  using namespace hotpy;
  module.doc() = "Handlers of XLA's foreign function interface, for hotcore.jax.";
  module.attr("API_VERSION") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  module.def("handlers", [] {
    nb::dict out;
    out["cpu"] = handlers<Cpu>();
    out["CUDA"] = handlers<Cuda>();
    return out;
  });
  module.def(
      "set_cpu",
      [](int threads, std::string_view isa) {
        cpu_choice().set(threads,
                         isa.empty() ? std::nullopt : std::optional<hot::Isa>(parse_isa(isa)));
      },
      nb::arg("threads"), nb::arg("isa"));
}
