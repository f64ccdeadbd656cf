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

// A function of libhot by another or the same name, with the context before the arguments.
#define HOT_CALL(name, function)                                       \
  template <class... Arguments>                                        \
  Outcome name(const Arguments&... arguments) {                        \
    return outcome_of([&] { hot::function(context_, arguments...); }); \
  }
  HOT_CALL(fwht, fwht)
  HOT_CALL(quantize, quantize)
  HOT_CALL(dequantize, dequantize)
  HOT_CALL(pack_int4, pack_int4)
  HOT_CALL(unpack_int4, unpack_int4)
  HOT_CALL(encode_blocks, encode_blocks)
  HOT_CALL(sum_blocks, sum_blocks)
  HOT_CALL(gemm_int8, gemm_int8)
  HOT_CALL(gemm_int4, gemm_int4)
  HOT_CALL(compress_activation, compress_activation)
  HOT_CALL(decompress_activation, decompress_activation)
  HOT_CALL(quantize_weight, quantize_weight)
  HOT_CALL(backward, backward_linear)
  HOT_CALL(quantize_forward_weight, quantize_forward_weight)
  HOT_CALL(quantize_forward_input, quantize_forward_input)
  HOT_CALL(forward, forward_linear)
#undef HOT_CALL
  Outcome hla(const TensorView& x, const hot::BackwardLinearSpec& spec, hot::Side side,
              const TensorView& out) {
    return outcome_of([&] { hot::hla(context_, x, spec.low_rank, side, out); });
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
