// libFuzzer target for the C++ API.
#include "calls.h"

namespace {

using namespace hot_fuzz;

// Any exception except hot::Error ends the run.
template <class Call>
Outcome outcome_of(const Call& call) {
  try {
    call();
    return {};
  } catch (const hot::Error& error) {
    return {static_cast<int>(error.code()) + 1, error.what()};
  }
}

class CppApi {
 public:
  explicit CppApi(Input& input) : context_(context_with(input.from(0, 2), input.from(0, 2))) {}
  const hot::Context& context() const { return context_; }
  void begin() {}
  const char* refused() const { return nullptr; }

  Outcome fwht(const TensorView& x, int axis, int block, const TensorView& out) {
    return outcome_of([&] { hot::fwht(context_, x, axis, block, out); });
  }
  Outcome hla(const TensorView& x, const hot::BackwardLinearSpec& spec, hot::Side side,
              const TensorView& out) {
    return outcome_of([&] { hot::hla(context_, x, spec.low_rank, side, out); });
  }
  Outcome quantize(const TensorView& x, const hot::QuantSpec& spec, const TensorView& q,
                   const TensorView& scale) {
    return outcome_of([&] { hot::quantize(context_, x, spec, q, scale); });
  }
  Outcome dequantize(const TensorView& q, const TensorView& scale, hot::Granularity granularity,
                     const TensorView& out) {
    return outcome_of([&] { hot::dequantize(context_, q, scale, granularity, out); });
  }
  Outcome pack_int4(const TensorView& q, const TensorView& out) {
    return outcome_of([&] { hot::pack_int4(context_, q, out); });
  }
  Outcome unpack_int4(const TensorView& packed, const TensorView& out) {
    return outcome_of([&] { hot::unpack_int4(context_, packed, out); });
  }
  Outcome encode_blocks(const TensorView& x, hot::Rounding rounding, const TensorView& wire) {
    return outcome_of([&] { hot::encode_blocks(context_, x, rounding, wire); });
  }
  Outcome sum_blocks(const TensorView& wire, float factor, const TensorView& out) {
    return outcome_of([&] { hot::sum_blocks(context_, wire, factor, out); });
  }
  Outcome gemm_int8(const TensorView& a, const TensorView& b, const TensorView& a_scale,
                    const TensorView& b_scale, const hot::GemmSpec& spec, const TensorView& out,
                    const hot::Workspace& workspace) {
    return outcome_of(
        [&] { hot::gemm_int8(context_, a, b, a_scale, b_scale, spec, out, workspace); });
  }
  Outcome gemm_int4(const TensorView& a, const TensorView& b, std::int64_t k,
                    const TensorView& a_scale, const TensorView& b_scale, const hot::GemmSpec& spec,
                    const TensorView& out, const hot::Workspace& workspace) {
    return outcome_of(
        [&] { hot::gemm_int4(context_, a, b, k, a_scale, b_scale, spec, out, workspace); });
  }
  Outcome compress_activation(const TensorView& x, const hot::BackwardLinearSpec& spec,
                              const hot::SavedActivation& saved, const hot::Workspace& workspace) {
    return outcome_of([&] { hot::compress_activation(context_, x, spec, saved, workspace); });
  }
  Outcome decompress_activation(const hot::ConstSavedActivation& saved, std::int64_t first,
                                std::int64_t last, const hot::BackwardLinearSpec& spec,
                                const TensorView& out) {
    return outcome_of([&] { hot::decompress_activation(context_, saved, first, last, spec, out); });
  }
  Outcome quantize_weight(const TensorView& w, const hot::BackwardLinearSpec& spec,
                          const hot::QuantizedWeight& out, const hot::Workspace& workspace) {
    return outcome_of([&] { hot::quantize_weight(context_, w, spec, out, workspace); });
  }
  template <class Weight>
  Outcome backward(const TensorView& gy, const Weight& w, const hot::ConstSavedActivation& saved,
                   const hot::BackwardLinearSpec& spec, const hot::BackwardOutputs& out,
                   const hot::Workspace& workspace) {
    return outcome_of([&] { hot::backward_linear(context_, gy, w, saved, spec, out, workspace); });
  }

  Outcome quantize_forward_weight(const TensorView& w, const hot::ForwardLinearSpec& spec,
                                  const hot::QuantizedWeight& out) {
    return outcome_of([&] { hot::quantize_forward_weight(context_, w, spec, out); });
  }
  Outcome quantize_forward_input(const TensorView& x, const hot::ForwardLinearSpec& spec,
                                 const hot::QuantizedInput& out) {
    return outcome_of([&] { hot::quantize_forward_input(context_, x, spec, out); });
  }
  Outcome quantize_forward_input(const TensorView& x, const hot::ForwardLinearSpec& spec,
                                 const hot::QuantizedInput& out,
                                 const hot::BackwardLinearSpec& kept,
                                 const hot::SavedActivation& saved,
                                 const hot::Workspace& workspace) {
    return outcome_of(
        [&] { hot::quantize_forward_input(context_, x, spec, out, kept, saved, workspace); });
  }
  template <class Input, class Weight>
  Outcome forward(const Input& x, const Weight& w, const TensorView& bias,
                  const hot::ForwardLinearSpec& spec, const TensorView& y,
                  const hot::Workspace& workspace) {
    return outcome_of([&] { hot::forward_linear(context_, x, w, bias, spec, y, workspace); });
  }

  Outcome gemm_workspace(std::int64_t m, std::int64_t n, std::int64_t k, std::size_t& bytes) {
    return outcome_of([&] { bytes = hot::gemm_workspace(context_, m, n, k); });
  }
  Outcome weight_bytes(std::int64_t out, std::int64_t in, const hot::BackwardLinearSpec& spec,
                       std::size_t& bytes) {
    return outcome_of([&] { bytes = hot::quantized_weight_bytes(out, in, spec); });
  }
  Outcome weight_workspace(std::int64_t out, std::int64_t in, const hot::BackwardLinearSpec& spec,
                           std::size_t& bytes) {
    return outcome_of([&] { bytes = hot::quantize_weight_workspace(context_, out, in, spec); });
  }
  Outcome compress_workspace(std::int64_t tokens, std::int64_t in,
                             const hot::BackwardLinearSpec& spec, std::size_t& bytes) {
    return outcome_of(
        [&] { bytes = hot::compress_activation_workspace(context_, tokens, in, spec); });
  }
  Outcome backward_workspace(const hot::LinearShape& shape, const hot::BackwardLinearSpec& spec,
                             bool gx, bool gw, std::size_t& bytes) {
    return outcome_of(
        [&] { bytes = hot::backward_linear_workspace(context_, shape, spec, gx, gw); });
  }
  Outcome hla_rows(std::int64_t tokens, const hot::BackwardLinearSpec& spec, std::int64_t& rows) {
    return outcome_of([&] { rows = hot::hla_rows(tokens, spec.low_rank); });
  }
  Outcome saved_layout(std::int64_t tokens, std::int64_t in, const hot::BackwardLinearSpec& spec,
                       hot::SavedLayout& layout) {
    return outcome_of([&] { layout = hot::saved_layout(tokens, in, spec); });
  }
  Outcome supported(const hot::LinearShape& shape, const hot::BackwardLinearSpec& spec) {
    const hot::Support support = hot::supported(context_, shape, spec);
    return {support.ok ? 0 : 2, support.why};
  }

  Outcome with_key(const hot::Key& key) {
    return outcome_of([&] { context_.with_key(key); });
  }
  Outcome with_isa(int isa) {
    return outcome_of([&] { context_.with_isa(static_cast<hot::Isa>(isa)); });
  }
  Outcome with_arch(int arch) {
    return outcome_of([&] { context_.with_arch(arch); });
  }
  Outcome with_sm_margin(int sms) {
    return outcome_of([&] { context_.with_sm_margin(sms); });
  }
  Outcome cpu(int threads) {
    return outcome_of([&] { hot::Context::cpu(threads); });
  }
  Outcome cpu_on(decltype(hot::Executor::run) run, void* state, int threads) {
    return outcome_of([&] { hot::Context::cpu(hot::Executor{run, state}, threads); });
  }
  Outcome recipe(const std::string& name) {
    return outcome_of([&] { hot::recipe(name); });
  }
  Outcome basis_order(hot::Basis basis, int block) {
    return outcome_of([&] { hot::basis_order(basis, block); });
  }

 private:
  hot::Context context_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  return hot_fuzz::run<CppApi>(data, size);
}
