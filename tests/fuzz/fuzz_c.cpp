// libFuzzer target for the C ABI: the calls of calls.h, with null pointers and structs of other
// sizes.
#include "calls.h"
#include "hot/hot_c.h"

namespace {

using namespace hot_fuzz;
using View = const TensorView&;
using Spec = const hot::BackwardLinearSpec&;
using ForwardSpec = const hot::ForwardLinearSpec&;
using Room = const hot::Workspace&;
using Weight = const hot::ConstQuantizedWeight&;
using QuantizedX = const hot::ConstQuantizedInput&;
using Saved = const hot::ConstSavedActivation&;
using Outputs = const hot::BackwardOutputs&;

class CApi {
 public:
  explicit CApi(Input& input) : input_(input), context_(context_with(0)) {
    const int isa = input.from(0, static_cast<int>(hot::best_isa()));
    context_ = context_with(isa);
    expect(hot_context_copy(base(), &handle_));
    expect(hot_context_set_isa(handle_, isa));
  }
  CApi(const CApi&) = delete;
  CApi& operator=(const CApi&) = delete;
  ~CApi() { hot_context_destroy(handle_); }

  const hot::Context& context() const { return context_; }
  // Prepares a call. Afterwards `refused` is the reason why it must fail, or null.
  void begin() { refused_ = nullptr; }
  const char* refused() const { return refused_; }

// A function of libhot by its name in C++, with the context before the arguments.
#define HOT_CALL(name)                                        \
  template <class... Arguments>                               \
  Outcome name(const Arguments&... arguments) {               \
    return ended(hot_##name(handle(), passed(arguments)...)); \
  }
  HOT_CALL(fwht)
  HOT_CALL(hla)
  HOT_CALL(dequantize)
  HOT_CALL(pack_int4)
  HOT_CALL(unpack_int4)
  HOT_CALL(encode_blocks)
  HOT_CALL(sum_blocks)
  HOT_CALL(decompress_activation)
#undef HOT_CALL
  Outcome quantize(View x, const hot::QuantSpec& spec, View q, View scale) {
    return ended(hot_quantize(handle(), tensor(x), spec.bits, static_cast<int>(spec.scale),
                              static_cast<int>(spec.rounding), tensor(q), tensor(scale)));
  }
  Outcome gemm_int8(View a, View b, View a_scale, View b_scale, const hot::GemmSpec& spec, View out,
                    Room workspace) {
    return ended(hot_gemm_int8(handle(), tensor(a), tensor(b), optional(a_scale), optional(b_scale),
                               spec.divisor, spec.accumulate, tensor(out), workspace.data,
                               workspace.bytes));
  }
  Outcome gemm_int4(View a, View b, std::int64_t k, View a_scale, View b_scale,
                    const hot::GemmSpec& spec, View out, Room workspace) {
    return ended(hot_gemm_int4(handle(), tensor(a), tensor(b), k, optional(a_scale),
                               optional(b_scale), spec.divisor, spec.accumulate, tensor(out),
                               workspace.data, workspace.bytes));
  }
  Outcome compress_activation(View x, Spec spec, const hot::SavedActivation& saved,
                              Room workspace) {
    hot_saved out = HOT_SAVED_INIT;
    return filled(out, [&] {
      return hot_compress_activation(handle(), tensor(x), spec_of(spec), saved.data, saved.bytes,
                                     workspace.data, workspace.bytes, &out);
    });
  }
  Outcome quantize_weight(View w, Spec spec, const hot::QuantizedWeight& to, Room workspace) {
    hot_weight out = HOT_WEIGHT_INIT;
    return filled(out, [&] {
      return hot_quantize_weight(handle(), tensor(w), spec_of(spec), to.data, to.bytes,
                                 workspace.data, workspace.bytes, &out);
    });
  }
  Outcome backward(View gy, View w, Saved saved, Spec spec, Outputs out, Room workspace) {
    return ended(hot_backward_linear(handle(), tensor(gy), optional(w), saved_of(saved, out),
                                     spec_of(spec), gradients(out), workspace.data,
                                     workspace.bytes));
  }
  Outcome backward(View gy, Weight w, Saved saved, Spec spec, Outputs out, Room workspace) {
    const hot_weight* const weight = out.gx == nullptr ? nullptr : weight_of(w);
    return ended(hot_backward_linear_quantized(handle(), tensor(gy), weight, saved_of(saved, out),
                                               spec_of(spec), gradients(out), workspace.data,
                                               workspace.bytes));
  }

  Outcome quantize_forward_weight(View w, ForwardSpec spec, const hot::QuantizedWeight& to) {
    hot_weight out = HOT_WEIGHT_INIT;
    return filled(out, [&] {
      return hot_quantize_forward_weight(handle(), tensor(w), spec_of(spec), to.data, to.bytes,
                                         &out);
    });
  }
  Outcome quantize_forward_input(View x, ForwardSpec spec, const hot::QuantizedInput& to) {
    hot_input out = HOT_INPUT_INIT;
    return filled(out, [&] {
      return hot_quantize_forward_input(handle(), tensor(x), spec_of(spec), to.data, to.bytes, &out,
                                        nullptr, nullptr, 0, nullptr, 0, nullptr);
    });
  }
  Outcome quantize_forward_input(View x, ForwardSpec spec, const hot::QuantizedInput& to, Spec kept,
                                 const hot::SavedActivation& room, Room workspace) {
    hot_input out = HOT_INPUT_INIT;
    hot_saved saved = HOT_SAVED_INIT;
    const hot_saved before = saved;
    const Outcome outcome = filled(out, [&] {
      return hot_quantize_forward_input(handle(), tensor(x), spec_of(spec), to.data, to.bytes, &out,
                                        plain(kept), room.data, room.bytes, workspace.data,
                                        workspace.bytes, &saved);
    });
    if (!outcome.ok() && std::memcmp(&before, &saved, sizeof saved) != 0) {
      broken("a hot_saved was filled before the error: " + outcome.text);
    }
    return outcome;
  }
  Outcome forward(View x, View w, View bias, ForwardSpec spec, View y, Room workspace) {
    return ended(hot_forward_linear(handle(), tensor(x), tensor(w), optional(bias), spec_of(spec),
                                    tensor(y), workspace.data, workspace.bytes));
  }
  Outcome forward(View x, Weight w, View bias, ForwardSpec spec, View y, Room workspace) {
    return ended(hot_forward_linear_quantized(handle(), tensor(x), weight_of(w), optional(bias),
                                              spec_of(spec), tensor(y), workspace.data,
                                              workspace.bytes));
  }
  Outcome forward(QuantizedX x, View w, View bias, ForwardSpec spec, View y, Room workspace) {
    return ended(hot_forward_linear_input(handle(), input_of(x), tensor(w), nullptr, optional(bias),
                                          spec_of(spec), tensor(y), workspace.data,
                                          workspace.bytes));
  }
  Outcome forward(QuantizedX x, Weight w, View bias, ForwardSpec spec, View y, Room workspace) {
    return ended(hot_forward_linear_input(handle(), input_of(x), nullptr, weight_of(w),
                                          optional(bias), spec_of(spec), tensor(y), workspace.data,
                                          workspace.bytes));
  }

  Outcome gemm_workspace(std::int64_t m, std::int64_t n, std::int64_t k, std::size_t& bytes) {
    return ended(hot_gemm_workspace(handle(), m, n, k, &bytes));
  }
  Outcome weight_bytes(std::int64_t out, std::int64_t in, Spec spec, std::size_t& bytes) {
    return ended(hot_quantized_weight_bytes(out, in, spec_of(spec), &bytes));
  }
  Outcome weight_workspace(std::int64_t out, std::int64_t in, Spec spec, std::size_t& bytes) {
    return ended(hot_quantize_weight_workspace(handle(), out, in, spec_of(spec), &bytes));
  }
  Outcome compress_workspace(std::int64_t tokens, std::int64_t in, Spec spec, std::size_t& bytes) {
    return ended(hot_compress_activation_workspace(handle(), tokens, in, spec_of(spec), &bytes));
  }
  Outcome backward_workspace(const hot::LinearShape& shape, Spec spec, bool gx, bool gw,
                             std::size_t& bytes) {
    return ended(hot_backward_linear_workspace(handle_, shape.tokens, shape.out_features,
                                               shape.in_features, plain(spec), gx, gw, &bytes));
  }
  Outcome hla_rows(std::int64_t tokens, Spec spec, std::int64_t& rows) {
    return ended(hot_hla_rows(tokens, spec_of(spec), &rows));
  }
  Outcome saved_layout(std::int64_t tokens, std::int64_t in, Spec spec, hot::SavedLayout& layout) {
    hot_saved_layout out = HOT_SAVED_LAYOUT_INIT;
    const Outcome outcome =
        filled(out, [&] { return hot_saved_layout_of(tokens, in, spec_of(spec), &out); });
    layout = {out.bytes,        out.channels,       out.k, out.k_padded, out.row_bytes, out.scales,
              out.scale_offset, out.exponent_offset};
    return outcome;
  }
  Outcome supported(const hot::LinearShape& shape, Spec spec) {
    return ended(
        hot_supported(handle_, shape.tokens, shape.out_features, shape.in_features, plain(spec)));
  }

  Outcome with_key(const hot::Key& key) {
    return ended(hot_context_set_key(handle_, key.seed, key.offset, key.stream, key.counter));
  }
  Outcome with_isa(int isa) { return ended(hot_context_set_isa(handle_, isa)); }
  Outcome with_arch(int arch) { return ended(hot_context_set_arch(handle_, arch)); }
  Outcome with_sm_margin(int sms) { return ended(hot_context_set_sm_margin(handle_, sms)); }
  Outcome cpu(int threads) {
    hot_context* out = nullptr;
    const Outcome outcome = ended(hot_context_cpu(threads, &out));
    hot_context_destroy(out);
    return outcome;
  }
  Outcome cpu_on(hot_run run, void* state, int threads) {
    hot_context* out = nullptr;
    const Outcome outcome = ended(hot_context_cpu_on(run, state, threads, &out));
    hot_context_destroy(out);
    return outcome;
  }
  Outcome recipe(const std::string& name) {
    hot_spec out = HOT_SPEC_INIT;
    return filled(out, [&] { return hot_spec_recipe(name.c_str(), &out); });
  }
  Outcome basis_order(hot::Basis basis, int block) {
    std::int32_t rows[64];
    return ended(hot_basis_order(static_cast<int>(basis), block, rows));
  }

 private:
  static void expect(hot_status status) {
    if (status != HOT_OK) broken(hot_last_error());
  }
  static const hot_context* base() {
    static const hot_context* const made = [] {
      hot_context* context = nullptr;
      expect(hot_context_cpu(1, &context));
      return context;
    }();
    return made;
  }

  static Outcome ended(hot_status status) {
    if (status == HOT_OK) return {};
    if (status != HOT_INVALID_ARGUMENT && status != HOT_UNSUPPORTED &&
        status != HOT_WORKSPACE_TOO_SMALL) {
      broken("status " + std::to_string(status) + ": " + hot_last_error());
    }
    return {status, hot_last_error()};
  }

  // Struct that the call fills, unchanged after an error.
  template <class T, class Call>
  Outcome filled(T& out, const Call& call) {
    T before = out;
    if (input_.rarely(40)) {
      out.struct_size = input_.from<std::size_t>(0, 8);
      before = out;
      refused_ = "a struct that is too short was filled";
    }
    const Outcome outcome = ended(call());
    if (!outcome.ok() && std::memcmp(&before, &out, sizeof out) != 0) {
      broken("a struct was filled before the error: " + outcome.text);
    }
    if (out.struct_size != before.struct_size) broken("a struct_size was changed");
    return outcome;
  }

  const hot_context* handle() {
    if (!input_.rarely(100)) return handle_;
    refused_ = "a context of null was taken";
    return nullptr;
  }

  // Struct in memory of its own size, sometimes of another version.
  template <class T>
  const T* put(T value) {
    if (input_.rarely(60)) {
      if (input_.rarely(2)) {
        refused_ = "a struct of null was taken";
        return nullptr;
      }
      switch (input_.from(0, 2)) {
        case 0:
          value.struct_size = input_.from<std::size_t>(0, std::min<std::size_t>(39, sizeof(T) - 1));
          refused_ = "a struct that is too short was taken";
          break;
        case 1: {
          const std::size_t size = sizeof(T) + input_.from<std::size_t>(1, 64);
          value.struct_size = size;
          const bool used = input_.flip();
          if (used) refused_ = "a struct with members that nobody knows was taken";
          return keep(value, size, used);
        }
        default:
          value.struct_size = std::size_t{1} << input_.from(12, 63);
          refused_ = "a struct of a size that cannot be was taken";
      }
    }
    return keep(value, sizeof(T), false);
  }
  template <class T>
  const T* keep(const T& value, std::size_t size, bool used) {
    kept_.emplace_back(new unsigned char[size]());
    unsigned char* const at = kept_.back().get();
    std::memcpy(at, &value, sizeof value);
    if (used) at[size - 1] = 1;
    return reinterpret_cast<const T*>(at);
  }

  static hot_tensor converted(View view) {
    hot_tensor t = HOT_TENSOR_INIT;
    t.data = view.data;
    t.dtype = static_cast<int>(view.dtype);
    t.device_type = static_cast<int>(view.device.type);
    t.device_index = view.device.index;
    t.ndim = view.ndim;
    for (int d = 0; d < hot::max_dims; ++d) {
      t.shape[d] = view.shape[d];
      t.stride[d] = view.stride[d];
    }
    return t;
  }
  const hot_tensor* tensor(View view) { return put(converted(view)); }
  // Arguments of HOT_CALL.
  template <class T>
  auto passed(const T& value) {
    if constexpr (std::is_same_v<T, TensorView>) {
      return tensor(value);
    } else if constexpr (std::is_same_v<T, hot::BackwardLinearSpec>) {
      return spec_of(value);
    } else if constexpr (std::is_same_v<T, hot::ConstSavedActivation>) {
      return saved_of(value);
    } else if constexpr (std::is_enum_v<T>) {
      return static_cast<int>(value);
    } else {
      return value;
    }
  }
  // Null if C++ has an empty view.
  const hot_tensor* optional(View view) {
    const bool none = view.ndim == 0 && view.data == nullptr;
    return none ? nullptr : keep(converted(view), sizeof(hot_tensor), false);
  }

  const hot_weight* weight_of(Weight w) {
    return put(
        hot_weight{sizeof(hot_weight), w.data, w.bytes, w.out_features, w.in_features, w.format});
  }
  const hot_input* input_of(QuantizedX x) {
    return put(hot_input{sizeof(hot_input), x.data, x.bytes, x.tokens, x.in_features, x.format});
  }
  const hot_saved* saved_of(Saved s, Outputs out) {
    return out.gw == nullptr ? nullptr : saved_of(s);
  }
  const hot_saved* saved_of(Saved s) {
    return put(hot_saved{sizeof(hot_saved), s.data, s.bytes, s.tokens, s.in_features, s.key.seed,
                         s.key.offset, s.key.counter, s.key.stream, 0, s.format});
  }

  const hot_gradients* gradients(Outputs out) {
    const auto one = [&](const TensorView* view) -> const hot_tensor* {
      return view == nullptr ? nullptr : keep(converted(*view), sizeof(hot_tensor), false);
    };
    return put(hot_gradients{sizeof(hot_gradients), one(out.gx), one(out.gw), one(out.gb),
                             out.accumulate ? 1 : 0, 0});
  }

  // gw_scale has its own numbers in C.
  static int gw_scale(hot::Granularity scale) {
    return scale == hot::Granularity::channel ? HOT_GW_SCALE_CHANNEL
           : scale == hot::Granularity::token ? HOT_GW_SCALE_TOKEN
                                              : static_cast<int>(scale);
  }

  hot_spec converted(Spec spec) {
    hot_spec s = HOT_SPEC_INIT;
    const hot::LowRank& p = spec.low_rank;
    s.hadamard_block = spec.hadamard_block;
    s.gx_bits = spec.gx_bits;
    s.gx_scale = static_cast<int>(spec.gx_scale);
    s.gx_rounding = static_cast<int>(spec.gx_rounding);
    s.basis = static_cast<int>(p.basis);
    s.block = p.block;
    s.rank = p.rank;
    if (!p.rows.empty()) {
      rows_.assign(p.rows.begin(), p.rows.end());
      s.rows = rows_.data();
      s.row_count = rows_.size();
    }
    s.grid_h = p.layout.grid_h;
    s.grid_w = p.layout.grid_w;
    s.prefix_tokens = p.layout.prefix_tokens;
    s.gw_scale = gw_scale(spec.gw_scale);
    s.gw_rounding = static_cast<int>(spec.gw_rounding);
    s.storage = static_cast<int>(spec.storage);
    s.equalize_tokens = spec.equalize_tokens ? 1 : 0;
    return s;
  }
  const hot_spec* plain(Spec spec) { return keep(converted(spec), sizeof(hot_spec), false); }
  const hot_forward_spec* spec_of(ForwardSpec spec) {
    return put(hot_forward_spec{sizeof(hot_forward_spec), spec.hadamard_block, 0});
  }
  const hot_spec* spec_of(Spec spec) {
    hot_spec s = converted(spec);
    if (input_.rarely(60)) {
      switch (input_.from(0, 2)) {
        case 0:
          s.rows = nullptr;
          s.row_count = static_cast<std::size_t>(input_.wild()) | 1;  // 0 would be a valid spec
          refused_ = "rows of null were taken";
          break;
        case 1:
          s.row_count = rows_.size() + 65 + static_cast<std::size_t>(input_.from(0, 9));
          refused_ = "more rows than there can be were taken";
          break;
        default:
          s.gw_rounding = -1;
          refused_ = "a rounding of -1 was taken";
      }
    }
    return put(s);
  }

  Input& input_;
  hot::Context context_;
  hot_context* handle_ = nullptr;
  const char* refused_ = nullptr;
  std::vector<std::unique_ptr<unsigned char[]>> kept_;
  std::vector<std::int32_t> rows_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  return hot_fuzz::run<CApi>(data, size);
}
