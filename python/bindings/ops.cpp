// Bindings of libhot's functions. Views are made with the GIL held; the work runs without it.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#if __has_include(<cxxabi.h>)
#include <cxxabi.h>
#endif

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "config_fields.h"
#include "views.h"

namespace hotpy {
namespace {

using namespace nb::literals;
using Text = std::string_view;

// Guard that releases the GIL. A daemon thread may take the GIL again after the interpreter has
// ended. Python before 3.14 then ends the thread by pthread_exit, whose unwinding would abort the
// process here. Instead the thread blocks until the process ends, as in Python 3.14.
class Gil {
 public:
  Gil() : state_(PyEval_SaveThread()) {}
  ~Gil() {
#if defined(__GLIBCXX__)
    try {
      PyEval_RestoreThread(state_);
    } catch (const abi::__forced_unwind&) {
      for (;;) pause();
    }
#else
    PyEval_RestoreThread(state_);
#endif
  }
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;

 private:
  PyThreadState* state_;
};

// Executor on the threads of the process's OpenMP library; `state` is its GOMP_parallel. The whole
// team is started each time, because OpenMP creates and ends threads if team sizes differ. Only
// `threads` of them work.
void run_openmp(void* state, int threads, hot::Executor::Work work, void* data) {
  struct Team {
    hot::Executor::Work work;
    void* data;
    std::atomic<int> left;
    static void enter(void* data_of_team) {
      Team& team = *static_cast<Team*>(data_of_team);
      if (team.left.fetch_sub(1) > 0) team.work(team.data);
    }
  } team{work, data, {threads}};
  using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
  constexpr unsigned usual = 0;
  reinterpret_cast<Parallel>(state)(&Team::enter, &team, usual, 0);
}

// Converts a field's value to Python: an int, a bool, a name, a tuple or None.
template <class Row, class T>
nb::object to_python(const Row& row, const T& value) {
  if constexpr (std::is_enum_v<T>) {
    return nb::str(hot::detail::name_of(row.choices, value));
  } else if constexpr (std::is_same_v<T, hot::TokenLayout>) {
    if (value.grid_h == 0 && value.grid_w == 0) return nb::none();
    return nb::make_tuple(value.grid_h, value.grid_w);
  } else if constexpr (std::is_same_v<T, std::vector<int>>) {
    if (value.empty()) return nb::none();
    return nb::tuple(nb::cast(value));
  } else {
    return nb::cast(value);
  }
}

// Inverse of to_python.
template <class Row, class T>
void from_python(const Row& row, nb::handle given, T& value) {
  const auto cast = [&](auto& out) {
    if (!nb::try_cast(given, out)) {
      throw nb::type_error((std::string(row.name) + ": unexpected type").c_str());
    }
  };
  if constexpr (std::is_enum_v<T>) {
    Text name;
    cast(name);
    value = hot::detail::parse_choice(row.name, name, row.choices);
  } else if constexpr (std::is_same_v<T, hot::TokenLayout>) {
    std::pair<int, int> grid{0, 0};
    if (!given.is_none()) cast(grid);
    std::tie(value.grid_h, value.grid_w) = grid;
  } else if constexpr (std::is_same_v<T, std::vector<int>>) {
    if (!given.is_none()) cast(value);
  } else {
    cast(value);
  }
}

template <class Settings>
nb::dict fields_of(const Settings& settings) {
  nb::dict fields;
  hot::detail::for_each_field(hot::detail::FieldsOf<Settings>{}, [&](const auto& row) {
    fields[row.name] = to_python(row, row.get(settings));
  });
  return fields;
}

void init_spec(Spec* self, const nb::kwargs& fields) {
  hot::BackwardLinearSpec spec;
  for (const auto& [name, value] : fields) {
    const nb::handle given = value;
    hot::detail::with_field<hot::BackwardLinearSpec>(
        nb::cast<Text>(name), [&](const auto& row) { from_python(row, given, row.get(spec)); });
  }
  new (self) Spec{std::move(spec)};
}

// Adds the rows of a settings table as tuples for hotcore.config.
template <class Settings>
void add_rows(nb::list& rows, bool backward) {
  const Settings defaults;
  hot::detail::for_each_field(hot::detail::FieldsOf<Settings>{}, [&](const auto& row) {
    using T = typename std::decay_t<decltype(row)>::Value;
    nb::list choices;
    if constexpr (std::is_enum_v<T>) {
      for (const auto& one : row.choices) choices.append(one.name);
    }
    const char* const type = std::is_same_v<T, int>                ? "int"
                             : std::is_same_v<T, bool>             ? "bool"
                             : std::is_same_v<T, std::vector<int>> ? "ints"
                             : std::is_enum_v<T>                   ? "choice"
                                                                   : "grid";
    rows.append(nb::make_tuple(row.name, type, nb::tuple(choices),
                               to_python(row, row.get(defaults)), row.values, row.doc, backward));
  });
}

nb::list config_fields() {
  nb::list rows;
  add_rows<hot::BackwardLinearSpec>(rows, true);
  add_rows<hot::detail::ForwardSettings>(rows, false);
  return rows;
}

// Fields of a recipe that differ from the defaults.
nb::dict recipe(Text name) {
  const nb::dict defaults = fields_of(hot::BackwardLinearSpec{});
  nb::dict changed;
  for (const auto& [field, value] : fields_of(hot::recipe(name))) {
    if (!value.equal(defaults[field])) changed[field] = value;
  }
  return changed;
}

// Number of tokens of x [..., I]: the product of its leading dimensions.
std::int64_t leading(const hot::ConstTensorView& x) {
  std::int64_t tokens = 1;
  for (int i = 0; i + 1 < x.ndim; ++i) tokens *= x.shape[i];
  return tokens;
}

void fwht(const CoreContext& c, const In& x, int axis, int block, const Out& out) {
  const hot::ConstTensorView xv = view(x, "x");
  const hot::TensorView ov = view(out, "out");
  Gil release;
  hot::fwht(c.context, xv, axis, block, ov);
}

void hla(const CoreContext& c, const In& x, Text basis, int block, int rank, std::vector<int> rows,
         int grid_h, int grid_w, int prefix_tokens, Text side, const KeyTuple& key,
         const Out& out) {
  const hot::LowRank spec =
      low_rank(basis, block, rank, std::move(rows), grid_h, grid_w, prefix_tokens);
  const hot::Side s = parse_side(side);
  const hot::ConstTensorView xv = view(x, "x");
  const hot::TensorView ov = view(out, "out");
  Gil release;
  hot::hla(c.context.with_key(key_of(key)), xv, spec, s, ov);
}

std::int64_t hla_rows(std::int64_t tokens, Text basis, int block, int rank, std::vector<int> rows,
                      int grid_h, int grid_w, int prefix_tokens) {
  return hot::hla_rows(
      tokens, low_rank(basis, block, rank, std::move(rows), grid_h, grid_w, prefix_tokens));
}

std::vector<int> basis_order(Text basis, int block) {
  return hot::basis_order(parse_basis(basis), block);
}

void quantize(const CoreContext& c, const In& x, int bits, Text scale, Text rounding,
              const KeyTuple& key, const Out& q, const Out& scale_out) {
  const hot::QuantSpec spec{bits, parse_granularity("scale", scale),
                            parse_rounding("rounding", rounding)};
  const hot::ConstTensorView xv = view(x, "x");
  const hot::TensorView qv = view(q, "q");
  const hot::TensorView sv = view(scale_out, "scale");
  Gil release;
  hot::quantize(c.context.with_key(key_of(key)), xv, spec, qv, sv);
}

void dequantize(const CoreContext& c, const In& q, const In& scale, Text granularity,
                const Out& out) {
  const hot::Granularity g = parse_granularity("granularity", granularity);
  const hot::ConstTensorView qv = view(q, "q");
  const hot::ConstTensorView sv = view(scale, "scale");
  const hot::TensorView ov = view(out, "out");
  Gil release;
  hot::dequantize(c.context, qv, sv, g, ov);
}

void pack_int4(const CoreContext& c, const In& q, const Out& out) {
  const hot::ConstTensorView qv = view(q, "q");
  const hot::TensorView ov = view(out, "out");
  Gil release;
  hot::pack_int4(c.context, qv, ov);
}

void unpack_int4(const CoreContext& c, const In& packed, const Out& out) {
  const hot::ConstTensorView pv = view(packed, "packed");
  const hot::TensorView ov = view(out, "out");
  Gil release;
  hot::unpack_int4(c.context, pv, ov);
}

void encode_blocks(const CoreContext& c, const In& x, Text rounding, const KeyTuple& key,
                   const Out& wire) {
  const hot::Rounding r = parse_rounding("rounding", rounding);
  const hot::ConstTensorView xv = view(x, "x");
  const hot::TensorView wv = view(wire, "wire");
  Gil release;
  hot::encode_blocks(c.context.with_key(key_of(key)), xv, r, wv);
}

void sum_blocks(const CoreContext& c, const In& wire, float factor, const Out& out) {
  const hot::ConstTensorView wv = view(wire, "wire");
  const hot::TensorView ov = view(out, "out");
  Gil release;
  hot::sum_blocks(c.context, wv, factor, ov);
}

std::size_t gemm_workspace(const CoreContext& c, std::int64_t m, std::int64_t n, std::int64_t k) {
  return hot::gemm_workspace(c.context, m, n, k);
}

// Product of INT8 operands if k < 0 (K is their number of columns), otherwise of packed INT4.
void gemm(const CoreContext& c, const In& a, const In& b, std::int64_t k, const In& a_scale,
          const In& b_scale, int divisor, bool accumulate, const Out& out, const Out& workspace) {
  const hot::ConstTensorView av = view(a, "a");
  const hot::ConstTensorView bv = view(b, "b");
  const hot::ConstTensorView asv = view(a_scale, "a_scale");
  const hot::ConstTensorView bsv = view(b_scale, "b_scale");
  const hot::TensorView ov = view(out, "out");
  const hot::GemmSpec spec{divisor, accumulate};
  const Scratch scratch(c.context, workspace, [&]() -> std::size_t {
    // Invalid arguments: the call below raises.
    if (av.ndim != 2 || bv.ndim != 2 || (k >= 0 && (k + 1) / 2 != av.shape[1])) return 0;
    return hot::gemm_workspace(c.context, av.shape[0], bv.shape[0], k < 0 ? av.shape[1] : k);
  });
  Gil release;
  if (k < 0) {
    hot::gemm_int8(c.context, av, bv, asv, bsv, spec, ov, scratch.get());
  } else {
    hot::gemm_int4(c.context, av, bv, k, asv, bsv, spec, ov, scratch.get());
  }
}

void gemm_int8(const CoreContext& c, const In& a, const In& b, const In& a_scale, const In& b_scale,
               int divisor, bool accumulate, const Out& out, const Out& workspace) {
  gemm(c, a, b, -1, a_scale, b_scale, divisor, accumulate, out, workspace);
}

void gemm_int4(const CoreContext& c, const In& a, const In& b, std::int64_t k, const In& a_scale,
               const In& b_scale, int divisor, bool accumulate, const Out& out,
               const Out& workspace) {
  if (k < 0) throw hot::Error(hot::ErrorCode::invalid_argument, "k: expected 0 or more");
  gemm(c, a, b, k, a_scale, b_scale, divisor, accumulate, out, workspace);
}

// Returns (bytes, channels, k, k_padded, row_bytes, scales, scale_offset, exponent_offset).
std::tuple<std::size_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t,
           std::size_t, std::size_t>
saved_layout(std::int64_t tokens, std::int64_t in_features, const Spec& s) {
  const hot::SavedLayout l = hot::saved_layout(tokens, in_features, s.spec);
  return {l.bytes,        l.channels,       l.k, l.k_padded, l.row_bytes, l.scales,
          l.scale_offset, l.exponent_offset};
}

std::size_t compress_activation_workspace(const CoreContext& c, std::int64_t tokens,
                                          std::int64_t in_features, const Spec& s) {
  return hot::compress_activation_workspace(c.context, tokens, in_features, s.spec);
}

// View of a compressed activation. Its buffer does not store a format: Python stores the
// configuration, and hotcore.backward_linear compares it.
hot::ConstSavedActivation kept_view(const In& array, const char* name, std::int64_t tokens,
                                    std::int64_t in_features, const hot::BackwardLinearSpec& spec) {
  hot::ConstSavedActivation out = saved_view(array, name);
  out.tokens = tokens;
  out.in_features = in_features;
  out.format = hot::saved_format(spec);
  return out;
}

void compress_activation(const CoreContext& c, const In& x, const Spec& s, const KeyTuple& key,
                         const Out& saved, const Out& workspace) {
  const hot::ConstTensorView xv = view(x, "x");
  const hot::SavedActivation saved_out = saved_view(saved, "saved");
  const Scratch scratch(c.context, workspace, [&]() -> std::size_t {
    if (xv.ndim < 2) return 0;  // the call below raises
    return hot::compress_activation_workspace(c.context, leading(xv), xv.shape[xv.ndim - 1],
                                              s.spec);
  });
  Gil release;
  hot::compress_activation(c.context.with_key(key_of(key)), xv, s.spec, saved_out, scratch.get());
}

void decompress_activation(const CoreContext& c, const In& saved, std::int64_t tokens,
                           std::int64_t in_features, const KeyTuple& saved_key, std::int64_t first,
                           std::int64_t last, const Spec& s, const Out& out) {
  hot::ConstSavedActivation sv = kept_view(saved, "saved", tokens, in_features, s.spec);
  sv.key = key_of(saved_key);
  const hot::TensorView ov = view(out, "out");
  Gil release;
  hot::decompress_activation(c.context, sv, first, last, s.spec, ov);
}

std::size_t quantized_weight_bytes(std::int64_t out_features, std::int64_t in_features,
                                   const Spec& s) {
  return hot::quantized_weight_bytes(out_features, in_features, s.spec);
}

std::size_t quantize_weight_workspace(const CoreContext& c, std::int64_t out_features,
                                      std::int64_t in_features, const Spec& s) {
  return hot::quantize_weight_workspace(c.context, out_features, in_features, s.spec);
}

void quantize_weight(const CoreContext& c, const In& w, const Spec& s, const Out& out,
                     const Out& workspace) {
  const hot::ConstTensorView wv = view(w, "w");
  const hot::SavedActivation bytes = saved_view(out, "out");
  const Scratch scratch(c.context, workspace, [&]() -> std::size_t {
    if (wv.ndim != 2) return 0;  // invalid: the call below raises
    return hot::quantize_weight_workspace(c.context, wv.shape[0], wv.shape[1], s.spec);
  });
  Gil release;
  hot::quantize_weight(c.context, wv, s.spec, {bytes.data, bytes.bytes}, scratch.get());
}

std::size_t backward_linear_workspace(const CoreContext& c, std::int64_t tokens,
                                      std::int64_t out_features, std::int64_t in_features,
                                      const Spec& s, bool need_gx, bool need_gw) {
  return hot::backward_linear_workspace(c.context, {tokens, out_features, in_features}, s.spec,
                                        need_gx, need_gw);
}

void backward_linear(const CoreContext& c, const In& gy, const In& w, const In& saved,
                     std::int64_t tokens, std::int64_t in_features, const KeyTuple& saved_key,
                     const Spec& s, const KeyTuple& key, const Out& gx, const Out& gw,
                     const Out& gb, bool accumulate, const Out& workspace,
                     const In& quantized_weight) {
  const hot::ConstTensorView gyv = view(gy, "gy");
  const hot::ConstTensorView wv = view(w, "w");
  hot::ConstSavedActivation sv = kept_view(saved, "saved", tokens, in_features, s.spec);
  sv.key = key_of(saved_key);
  std::optional<hot::TensorView> gxv, gwv, gbv;
  if (gx.is_valid()) gxv = view(gx, "gx");
  if (gw.is_valid()) gwv = view(gw, "gw");
  if (gb.is_valid()) gbv = view(gb, "gb");
  hot::BackwardOutputs outputs;
  outputs.gx = gxv ? &*gxv : nullptr;
  outputs.gw = gwv ? &*gwv : nullptr;
  outputs.gb = gbv ? &*gbv : nullptr;
  outputs.accumulate = accumulate;
  const hot::ConstSavedActivation bytes = saved_view(quantized_weight, "quantized_weight");
  const hot::ConstQuantizedWeight qv{bytes.data, bytes.bytes,
                                     gyv.ndim >= 2 ? gyv.shape[gyv.ndim - 1] : 0, in_features,
                                     hot::weight_format(s.spec)};
  const Scratch scratch(c.context, workspace, [&]() -> std::size_t {
    if (gyv.ndim < 2) return 0;
    const hot::LinearShape shape{leading(gyv), gyv.shape[gyv.ndim - 1], in_features};
    return hot::backward_linear_workspace(c.context, shape, s.spec, gxv.has_value(),
                                          gwv.has_value());
  });
  const hot::Context context = c.context.with_key(key_of(key));
  Gil release;
  if (quantized_weight.is_valid()) {
    hot::backward_linear(context, gyv, qv, sv, s.spec, outputs, scratch.get());
  } else {
    hot::backward_linear(context, gyv, wv, sv, s.spec, outputs, scratch.get());
  }
}

std::size_t forward_weight_bytes(std::int64_t out_features, std::int64_t in_features,
                                 const hot::ForwardLinearSpec& spec) {
  return hot::forward_weight_bytes(out_features, in_features, spec);
}

void quantize_forward_weight(const CoreContext& c, const In& w, const hot::ForwardLinearSpec& spec,
                             const Out& out) {
  const hot::ConstTensorView wv = view(w, "w");
  const hot::SavedActivation bytes = saved_view(out, "out");
  Gil release;
  hot::quantize_forward_weight(c.context, wv, spec, {bytes.data, bytes.bytes});
}

std::size_t forward_input_bytes(std::int64_t tokens, std::int64_t in_features,
                                const hot::ForwardLinearSpec& spec) {
  return hot::forward_input_bytes(tokens, in_features, spec);
}

// Quantises x for the forward product and, if `kept` is not null, compresses it into `saved`.
void quantize_forward_input(const CoreContext& c, const In& x, const hot::ForwardLinearSpec& spec,
                            const Out& out, const Spec* kept, const KeyTuple& key, const Out& saved,
                            const Out& workspace, const In& exponents) {
  const hot::ConstTensorView xv = view(x, "x");
  const hot::ConstTensorView powers = view(exponents, "exponents");
  const hot::SavedActivation bytes = saved_view(out, "out");
  const hot::QuantizedInput to{bytes.data, bytes.bytes};
  if (kept == nullptr) {
    Gil release;
    hot::quantize_forward_input(c.context, xv, spec, to, powers);
    return;
  }
  const hot::SavedActivation sv = saved_view(saved, "saved");
  const Scratch scratch(c.context, workspace, [&]() -> std::size_t {
    if (xv.ndim < 2) return 0;  // invalid: the call below raises
    return hot::compress_activation_workspace(c.context, leading(xv), xv.shape[xv.ndim - 1],
                                              kept->spec);
  });
  Gil release;
  hot::quantize_forward_input(c.context.with_key(key_of(key)), xv, spec, to, kept->spec, sv,
                              scratch.get(), powers);
}

std::uint64_t weight_int4_format(const hot::ForwardLinearSpec& spec, int group) {
  return hot::weight_int4_format({spec, group});
}

std::size_t weight_int4_bytes(std::int64_t out_features, std::int64_t in_features,
                              const hot::ForwardLinearSpec& spec, int group) {
  return hot::weight_int4_bytes(out_features, in_features, {spec, group});
}

void quantize_weight_int4(const CoreContext& c, const In& w, const In& exponents,
                          const hot::ForwardLinearSpec& spec, int group, const Out& out) {
  const hot::ConstTensorView wv = view(w, "w");
  const hot::ConstTensorView powers = view(exponents, "exponents");
  const hot::SavedActivation bytes = saved_view(out, "out");
  Gil release;
  hot::quantize_weight_int4(c.context, wv, powers, {spec, group}, {bytes.data, bytes.bytes});
}

void expand_weight_int4(const CoreContext& c, const In& w, std::int64_t out_features,
                        std::int64_t in_features, const hot::ForwardLinearSpec& spec, int group,
                        const Out& out) {
  const hot::ConstSavedActivation from = saved_view(w, "w");
  const hot::SavedActivation bytes = saved_view(out, "out");
  const hot::WeightInt4Spec full{spec, group};
  Gil release;
  hot::expand_weight_int4(
      c.context, {from.data, from.bytes, out_features, in_features, hot::weight_int4_format(full)},
      full, {bytes.data, bytes.bytes});
}

std::size_t dequantize_weight_workspace(const CoreContext&, std::int64_t out_features,
                                        std::int64_t in_features,
                                        const hot::ForwardLinearSpec& spec, int group) {
  return Codes{{}, out_features, in_features, spec, group}.expanded();
}

void dequantize_weight(const CoreContext& c, const In& w, std::int64_t out_features,
                       std::int64_t in_features, const hot::ForwardLinearSpec& spec, const Out& out,
                       const In& exponents, int group, const Out& workspace) {
  const Codes from{saved_view(w, "w"), out_features, in_features, spec, group};
  const hot::TensorView to = view(out, "out");
  const hot::ConstTensorView powers = view(exponents, "exponents");
  const Scratch scratch(c.context, workspace, [&] { return from.expanded(); });
  hot::Workspace space = scratch.get();
  Gil release;
  hot::dequantize_weight(c.context, from.in_int8(c.context, space), spec, to, powers);
}

std::size_t forward_linear_workspace(const CoreContext& c, std::int64_t tokens,
                                     std::int64_t out_features, std::int64_t in_features,
                                     const hot::ForwardLinearSpec& spec, bool quantized_weight,
                                     bool quantized_input, int group) {
  return hot::forward_linear_workspace(c.context, {tokens, out_features, in_features}, spec,
                                       quantized_weight, quantized_input) +
         Codes{{}, out_features, in_features, spec, group}.expanded();
}

// forward_linear for x and w, or for the results of quantize_forward_input (with `in_features`) and
// quantize_forward_weight (with `group` quantize_weight_int4).
void forward_linear(const CoreContext& c, const In& x, const In& w, const In& bias,
                    const hot::ForwardLinearSpec& spec, const Out& y, const Out& workspace,
                    const In& quantized_weight, const In& quantized_input, std::int64_t in_features,
                    int group) {
  const hot::ConstTensorView xv = view(x, "x");
  const hot::ConstTensorView wv = view(w, "w");
  const hot::ConstTensorView bv = view(bias, "bias");
  const hot::TensorView yv = view(y, "y");
  const bool quantized = quantized_weight.is_valid(), input = quantized_input.is_valid();
  if (!input) in_features = xv.ndim >= 2 ? xv.shape[xv.ndim - 1] : 0;
  const std::int64_t out_features = yv.ndim >= 2 ? yv.shape[yv.ndim - 1] : 0;
  const std::int64_t tokens = yv.ndim >= 2 ? leading(yv) : 0;
  const Codes weight{saved_view(quantized_weight, "quantized_weight"), out_features, in_features,
                     spec, group};
  const hot::ConstSavedActivation codes = saved_view(quantized_input, "quantized_input");
  const Scratch scratch(c.context, workspace, [&]() -> std::size_t {
    if ((!input && xv.ndim < 2) || yv.ndim < 2) return 0;  // invalid: the call below raises
    return forward_linear_workspace(c, input ? tokens : leading(xv), out_features, in_features,
                                    spec, quantized, input, group);
  });
  const hot::ConstQuantizedInput qx{codes.data, codes.bytes, tokens, in_features,
                                    hot::forward_input_format(spec)};
  hot::Workspace space = scratch.get();
  const auto run = [&](const auto& left, const auto& right) {
    hot::forward_linear(c.context, left, right, bv, spec, yv, space);
  };
  Gil release;
  const hot::ConstQuantizedWeight qw =
      quantized ? weight.in_int8(c.context, space) : hot::ConstQuantizedWeight{};
  if (input) {
    quantized ? run(qx, qw) : run(qx, wv);
  } else {
    quantized ? run(xv, qw) : run(xv, wv);
  }
}

std::pair<bool, std::string> forward_supported(const CoreContext& c, std::int64_t tokens,
                                               std::int64_t out_features, std::int64_t in_features,
                                               const hot::ForwardLinearSpec& spec) {
  const hot::Support support =
      hot::forward_supported(c.context, {tokens, out_features, in_features}, spec);
  return {support.ok, support.why};
}

std::pair<bool, std::string> supported(const CoreContext& c, std::int64_t tokens,
                                       std::int64_t out_features, std::int64_t in_features,
                                       const Spec& s) {
  const hot::Support support =
      hot::supported(c.context, {tokens, out_features, in_features}, s.spec);
  return {support.ok, support.why};
}

hot::DType float_of(Text name) {
  for (const hot::DType dtype : {hot::DType::f32, hot::DType::f16, hot::DType::bf16}) {
    if (name == hot::dtype_name(dtype)) return dtype;
  }
  throw hot::Error(hot::ErrorCode::invalid_argument,
                   "dtype: " + std::string(name) + "; expected float32, float16 or bfloat16");
}

nb::dict explanation(const hot::Explanation& e) {
  nb::list steps;
  for (const hot::ExplainedStep& step : e.steps) {
    nb::dict d;
    d["call"] = step.call;
    d["kernel"] = step.kernel;
    d["file"] = step.file;
    d["blocks"] = step.blocks;
    d["threads"] = step.threads;
    d["cluster"] = step.cluster;
    d["shared_bytes"] = step.shared_bytes;
    d["reads"] = nb::tuple(nb::cast(step.reads));
    d["writes"] = nb::tuple(nb::cast(step.writes));
    d["bytes_read"] = step.bytes_read;
    d["bytes_written"] = step.bytes_written;
    d["operations"] = step.operations;
    d["independent"] = step.independent;
    d["slow"] = step.slow;
    d["passed_over"] = nb::tuple(nb::cast(step.passed_over));
    steps.append(d);
  }
  nb::dict d;
  d["device"] = e.device;
  d["lacks"] = nb::tuple(nb::cast(e.lacks));
  d["steps"] = steps;
  d["workspace"] = e.workspace;
  d["gy_passes"] = e.gy_passes;
  d["bytes_read"] = e.bytes_read;
  d["bytes_written"] = e.bytes_written;
  d["operations"] = e.operations;
  d["floor_us"] = e.floor_us;
  d["rates"] = e.rates;
  d["slow"] = nb::tuple(nb::cast(e.slow));
  d["text"] = e.text;
  return d;
}

nb::dict explain(Text device, std::int64_t tokens, std::int64_t out_features,
                 std::int64_t in_features, const Spec& s, Text dtype, Text gw_dtype, bool compress,
                 bool gx, bool gw, bool gb, bool accumulate, bool quantized_weight, bool wgmma,
                 const hot::ForwardLinearSpec* forward, bool bias, Text bias_dtype,
                 bool quantized_forward_weight) {
  hot::ExplainOptions options;
  options.dtype = float_of(dtype);
  options.gw_dtype = float_of(gw_dtype);
  options.compress = compress;
  options.gx = gx;
  options.gw = gw;
  options.gb = gb;
  options.accumulate = accumulate;
  options.quantized_weight = quantized_weight;
  options.wgmma = wgmma;
  options.y = forward != nullptr;
  if (forward != nullptr) options.forward = *forward;
  options.bias = bias;
  options.bias_dtype = float_of(bias_dtype);
  options.quantized_forward_weight = quantized_forward_weight;
  return explanation(hot::explain(device, {tokens, out_features, in_features}, s.spec, options));
}

nb::dict explain_gemm(Text device, std::int64_t m, std::int64_t n, std::int64_t k, Text out_dtype,
                      bool int4, bool accumulate, bool wgmma) {
  return explanation(
      hot::explain_gemm(device, m, n, k, {float_of(out_dtype), int4, accumulate, wgmma}));
}

std::pair<std::string, std::string> verdict(const hot::DeviceVerdict& device) {
  return {hot::level_name(device.level), device.text};
}

}  // namespace

CoreContext::CoreContext(int threads, Text isa, int device, std::uintptr_t stream,
                         std::uintptr_t openmp, int sm_margin)
    : context(device >= 0 ? hot::Context::cuda(device, reinterpret_cast<hot::Stream>(stream))
              : openmp != 0
                  ? hot::Context::cpu({run_openmp, reinterpret_cast<void*>(openmp)}, threads)
                  : hot::Context::cpu(threads)) {
  if (!isa.empty()) context = context.with_isa(parse_isa(isa));
  context = context.with_sm_margin(sm_margin);
}

void bind_ops(nb::module_& m) {
  m.def("version", [] { return std::string(hot::version()); });
  m.def("built_with_cuda", [] { return hot::built_with_cuda(); });
  m.def("cuda_architectures", [] { return std::string(hot::cuda_architectures()); });
  m.def("cuda_wgmma", [] { return hot::cuda_wgmma(); });
  m.def(
      "judge_device",
      [](int major, int minor, const std::string& architectures, bool wgmma) {
        return verdict(hot::judge_device(major, minor, architectures, wgmma));
      },
      "major"_a, "minor"_a, "architectures"_a, "wgmma"_a);
  m.def(
      "cuda_device_verdict", [](int device) { return verdict(hot::cuda_device_verdict(device)); },
      "device"_a);
  m.def("best_isa", [] { return std::string(hot::isa_name(hot::best_isa())); });

  nb::class_<CoreContext>(m, "CoreContext",
                          "Device, stream or threads, and instruction set that calls run with.")
      .def(nb::init<int, Text, int, std::uintptr_t, std::uintptr_t, int>(), "threads"_a = 0,
           "isa"_a = "", "device"_a = -1, "stream"_a = 0, "openmp"_a = 0, "sm_margin"_a = 0)
      .def_prop_ro("sm_margin", [](const CoreContext& c) { return c.context.sm_margin(); })
      .def_prop_ro("threads", [](const CoreContext& c) { return c.context.threads(); })
      .def_prop_ro("isa",
                   [](const CoreContext& c) { return std::string(hot::isa_name(c.context.isa())); })
      .def_prop_ro("cuda", [](const CoreContext& c) {
        return c.context.device().type == hot::Device::Type::cuda;
      });

  nb::class_<Spec>(m, "Spec", "A BackwardLinearSpec, made once for a HotConfig.")
      .def("__init__", &init_spec);

  nb::class_<hot::ForwardLinearSpec>(m, "ForwardLinearSpec", "How forward_linear quantises.")
      .def(
          "__init__",
          [](hot::ForwardLinearSpec* self, int hadamard_block) {
            new (self) hot::ForwardLinearSpec{hadamard_block};
          },
          nb::kw_only(), "hadamard_block"_a = hot::ForwardLinearSpec{}.hadamard_block)
      .def_ro("hadamard_block", &hot::ForwardLinearSpec::hadamard_block);

  m.def("config_fields", &config_fields);
  m.def("recipe", &recipe, "name"_a);
  m.def("recipe_names", &hot::recipe_names);
  m.def("saved_format", [](const Spec& s) { return hot::saved_format(s.spec); }, "spec"_a);
  m.def("weight_format", [](const Spec& s) { return hot::weight_format(s.spec); }, "spec"_a);

  // Every array needs .noconvert(). Otherwise nanobind would copy an output of a wrong type, write
  // the copy and drop it.
  m.def("fwht", &fwht, "context"_a, "x"_a.noconvert(), "axis"_a, "block"_a, "out"_a.noconvert());
  m.def("hla", &hla, "context"_a, "x"_a.noconvert(), "basis"_a, "block"_a, "rank"_a, "rows"_a,
        "grid_h"_a, "grid_w"_a, "prefix_tokens"_a, "side"_a, "key"_a, "out"_a.noconvert());
  m.def("hla_rows", &hla_rows, "tokens"_a, "basis"_a, "block"_a, "rank"_a, "rows"_a, "grid_h"_a,
        "grid_w"_a, "prefix_tokens"_a);
  m.def("basis_order", &basis_order, "basis"_a, "block"_a);
  m.def("quantize", &quantize, "context"_a, "x"_a.noconvert(), "bits"_a, "scale"_a, "rounding"_a,
        "key"_a, "q"_a.noconvert(), "scale_out"_a.noconvert());
  m.def("dequantize", &dequantize, "context"_a, "q"_a.noconvert(), "scale"_a.noconvert(),
        "granularity"_a, "out"_a.noconvert());
  m.def("pack_int4", &pack_int4, "context"_a, "q"_a.noconvert(), "out"_a.noconvert());
  m.def("unpack_int4", &unpack_int4, "context"_a, "packed"_a.noconvert(), "out"_a.noconvert());
  m.def("encode_blocks", &encode_blocks, "context"_a, "x"_a.noconvert(), "rounding"_a, "key"_a,
        "wire"_a.noconvert());
  m.def("sum_blocks", &sum_blocks, "context"_a, "wire"_a.noconvert(), "factor"_a,
        "out"_a.noconvert());
  m.def("gemm_workspace", &gemm_workspace, "context"_a, "m"_a, "n"_a, "k"_a);
  m.def("gemm_int8", &gemm_int8, "context"_a, "a"_a.noconvert(), "b"_a.noconvert(),
        "a_scale"_a.noconvert().none(), "b_scale"_a.noconvert().none(), "divisor"_a, "accumulate"_a,
        "out"_a.noconvert(), "workspace"_a.noconvert().none() = nb::none());
  m.def("gemm_int4", &gemm_int4, "context"_a, "a"_a.noconvert(), "b"_a.noconvert(), "k"_a,
        "a_scale"_a.noconvert().none(), "b_scale"_a.noconvert().none(), "divisor"_a, "accumulate"_a,
        "out"_a.noconvert(), "workspace"_a.noconvert().none() = nb::none());
  m.def("saved_layout", &saved_layout, "tokens"_a, "in_features"_a, "spec"_a);
  m.def("compress_activation_workspace", &compress_activation_workspace, "context"_a, "tokens"_a,
        "in_features"_a, "spec"_a);
  m.def("compress_activation", &compress_activation, "context"_a, "x"_a.noconvert(), "spec"_a,
        "key"_a, "saved"_a.noconvert(), "workspace"_a.noconvert().none() = nb::none());
  m.def("decompress_activation", &decompress_activation, "context"_a, "saved"_a.noconvert(),
        "tokens"_a, "in_features"_a, "saved_key"_a, "first"_a, "last"_a, "spec"_a,
        "out"_a.noconvert());
  m.def("quantized_weight_bytes", &quantized_weight_bytes, "out_features"_a, "in_features"_a,
        "spec"_a);
  m.def("quantize_weight_workspace", &quantize_weight_workspace, "context"_a, "out_features"_a,
        "in_features"_a, "spec"_a);
  m.def("quantize_weight", &quantize_weight, "context"_a, "w"_a.noconvert(), "spec"_a,
        "out"_a.noconvert(), "workspace"_a.noconvert().none() = nb::none());
  m.def("backward_linear_workspace", &backward_linear_workspace, "context"_a, "tokens"_a,
        "out_features"_a, "in_features"_a, "spec"_a, "need_gx"_a, "need_gw"_a);
  m.def("backward_linear", &backward_linear, "context"_a, "gy"_a.noconvert(),
        "w"_a.noconvert().none(), "saved"_a.noconvert().none(), "tokens"_a, "in_features"_a,
        "saved_key"_a, "spec"_a, "key"_a, "gx"_a.noconvert().none(), "gw"_a.noconvert().none(),
        "gb"_a.noconvert().none(), "accumulate"_a, "workspace"_a.noconvert().none() = nb::none(),
        "quantized_weight"_a.noconvert().none() = nb::none());
  m.def("forward_weight_format", &hot::forward_weight_format, "spec"_a);
  m.def("forward_weight_bytes", &forward_weight_bytes, "out_features"_a, "in_features"_a, "spec"_a);
  m.def("quantize_forward_weight", &quantize_forward_weight, "context"_a, "w"_a.noconvert(),
        "spec"_a, "out"_a.noconvert());
  m.def("forward_input_format", &hot::forward_input_format, "spec"_a);
  m.def("forward_input_bytes", &forward_input_bytes, "tokens"_a, "in_features"_a, "spec"_a);
  m.def("quantize_forward_input", &quantize_forward_input, "context"_a, "x"_a.noconvert(), "spec"_a,
        "out"_a.noconvert(), "kept"_a.none() = nb::none(), "key"_a = KeyTuple{},
        "saved"_a.noconvert().none() = nb::none(), "workspace"_a.noconvert().none() = nb::none(),
        "exponents"_a.noconvert().none() = nb::none());
  m.def("weight_int4_format", &weight_int4_format, "spec"_a, "group"_a);
  m.def("weight_int4_bytes", &weight_int4_bytes, "out_features"_a, "in_features"_a, "spec"_a,
        "group"_a);
  m.def("quantize_weight_int4", &quantize_weight_int4, "context"_a, "w"_a.noconvert(),
        "exponents"_a.noconvert().none(), "spec"_a, "group"_a, "out"_a.noconvert());
  m.def("expand_weight_int4", &expand_weight_int4, "context"_a, "w"_a.noconvert(), "out_features"_a,
        "in_features"_a, "spec"_a, "group"_a, "out"_a.noconvert());
  m.def("dequantize_weight", &dequantize_weight, "context"_a, "w"_a.noconvert(), "out_features"_a,
        "in_features"_a, "spec"_a, "out"_a.noconvert(),
        "exponents"_a.noconvert().none() = nb::none(), "group"_a = 0,
        "workspace"_a.noconvert().none() = nb::none());
  m.def("dequantize_weight_workspace", &dequantize_weight_workspace, "context"_a, "out_features"_a,
        "in_features"_a, "spec"_a, "group"_a);
  m.def("forward_linear_workspace", &forward_linear_workspace, "context"_a, "tokens"_a,
        "out_features"_a, "in_features"_a, "spec"_a, "quantized_weight"_a,
        "quantized_input"_a = false, "group"_a = 0);
  m.def("forward_linear", &forward_linear, "context"_a, "x"_a.noconvert().none(),
        "w"_a.noconvert().none(), "bias"_a.noconvert().none(), "spec"_a, "y"_a.noconvert(),
        "workspace"_a.noconvert().none() = nb::none(),
        "quantized_weight"_a.noconvert().none() = nb::none(),
        "quantized_input"_a.noconvert().none() = nb::none(), "in_features"_a = 0, "group"_a = 0);
  m.def("forward_supported", &forward_supported, "context"_a, "tokens"_a, "out_features"_a,
        "in_features"_a, "spec"_a);
  m.def("explain_devices", &hot::explain_devices);
  m.def("explain", &explain, "device"_a, "tokens"_a, "out_features"_a, "in_features"_a, "spec"_a,
        "dtype"_a, "gw_dtype"_a, "compress"_a, "gx"_a, "gw"_a, "gb"_a, "accumulate"_a,
        "quantized_weight"_a, "wgmma"_a, "forward"_a.none() = nb::none(), "bias"_a = true,
        "bias_dtype"_a = "float32", "quantized_forward_weight"_a = false);
  m.def("explain_gemm", &explain_gemm, "device"_a, "m"_a, "n"_a, "k"_a, "out_dtype"_a, "int4"_a,
        "accumulate"_a, "wgmma"_a);
  m.def("supported", &supported, "context"_a, "tokens"_a, "out_features"_a, "in_features"_a,
        "spec"_a);
}

}  // namespace hotpy
