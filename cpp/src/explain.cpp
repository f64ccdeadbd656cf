// hot::explain: the plan of a layer as a list of kernels and as text.
#include "hot/explain.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <functional>

#include "checks.h"
#include "cuda_device.h"
#include "kernels.h"
#include "plan/plan.h"
#include "work.h"

namespace hot {

using namespace detail;
using namespace detail::plan;

namespace {

constexpr const char* call_name = "explain";

// ---- modelled devices --------------------------------------------------------------------------

// Figures of a GPU. The floor uses its INT8 operations and bytes per second.
struct NamedDevice {
  int arch;
  const char* gpu;
  int sm_count;
  std::int64_t shared_bytes;  // maximum per thread block
  double operations, bandwidth;
  const char* rates;
};

constexpr NamedDevice named_devices[] = {
    {80, "A100 80 GB", 108, 166912, 624e12, 2.04e12, "published"},
    {86, "RTX 3090", 82, 101376, 284e12, 0.936e12, "published"},
    {89, "RTX 4090", 128, 101376, 661e12, 1.008e12, "published"},
    {90, "H200", 132, 232448, 1450e12, 4.3e12, "measured (docs/dev/kernels.md)"},
    {100, "B200", 148, 232448, 4500e12, 8e12, "published"},
    {120, "RTX 5090", 170, 101376, 838e12, 1.79e12, "published"},
};

std::string name_of(int arch) { return "sm_" + std::to_string(arch); }

bool is_float(DType dtype) {
  return std::find(float_dtypes.begin(), float_dtypes.end(), dtype) != float_dtypes.end();
}

// Answers for a device that is not present. A present device asks CUTLASS.
class Model final : public DeviceQueries {
 public:
  // Tiles of 128 x 128 INT32 sums.
  std::size_t stream_k_workspace(std::int64_t m, std::int64_t n, std::int64_t,
                                 const Sm90Plan&) const override {
    return static_cast<std::size_t>(ceil_div(m, 128) * ceil_div(n, 128)) * 65536;
  }
};

DeviceFacts facts_of(const NamedDevice& device, const DeviceQueries& queries, bool wgmma) {
  DeviceFacts facts;
  facts.arch = device.arch;
  facts.sm_count = device.sm_count;
  facts.shared_bytes = device.shared_bytes;
  set_features(facts, true, wgmma);
  facts.int4_units = device.arch / 10 == 8;
  facts.queries = &queries;
  return facts;
}

// ---- steps of a plan: words and bytes ----------------------------------------------------------

// Form of x saved from a layer, without memory.
SavedX saved_shape(const LinearShape& shape, const BackwardLinearSpec& spec) {
  return saved_x(nullptr, saved_layout(shape.tokens, shape.in_features, spec), shape.tokens, spec);
}

// Bytes of each buffer of a call, and operations of the product that writes it.
struct Amounts {
  class Values {
   public:
    std::int64_t& operator[](Buffer buffer) { return of_[static_cast<int>(buffer)]; }
    std::int64_t operator[](Buffer buffer) const { return of_[static_cast<int>(buffer)]; }

   private:
    std::int64_t of_[buffer_count] = {};
  };
  Values bytes, operations;
};

std::int64_t size_of(const MatrixIn& x) { return x.rows * x.cols * element_bytes(x.dtype); }
std::int64_t size_of(const Codes& codes) { return codes.rows * codes.k_padded + 4 * codes.scales; }
std::int64_t size_of(const Groups& groups) {
  const std::int64_t scales = ceil_div(groups.tokens, int4_group);
  return groups.channels * (groups.row_bytes + 2 * scales);
}

Amounts amounts_of(const Work& work, const Plan& plan) {
  Amounts all;
  auto& bytes = all.bytes;  // stream-K's partial sums stay in the L2 cache: not counted
  for (const Operand& operand : work.operands) {
    const OperandQuant& quant = operand.quant;
    if (operand.from == From::matrix) bytes[matrix_buffer(operand.source)] = size_of(operand.x);
    if (operand.from == From::groups) bytes[Buffer::saved] = size_of(operand.groups);
    bytes[codes_buffer(operand)] =
        operand.code == Storage::int4 ? size_of(operand.groups) : size_of(operand.out);
    if (operand.from != From::matrix) continue;
    bytes[Buffer::exponents] = operand.x.rows;
    bytes[amax_buffer(operand)] = 4 * (quant.per_tensor        ? 1
                                       : quant.per_contraction ? operand.out.k_padded
                                                               : operand.out.rows);
  }
  for (const WorkProduct& product : work.products) {
    const GemmArgs& args = product.args;
    if (!product.exists()) continue;
    const Buffer out = buffer_of(product.result);
    bytes[out] = size_of(args.out.contents());
    all.operations[out] = 2 * args.m * args.n * args.k;
    if (args.a_scale_step == 0) bytes[Buffer::broadcast_a] = 4 * args.m;
    if (args.b_scale_step == 0) bytes[Buffer::broadcast_b] = 4 * args.n;
  }
  bytes[Buffer::bias] = size_of(work.bias);
  bytes[Buffer::wide_bias] = 4 * work.bias.cols;
  if (work.sum.out.cols > 0) bytes[Buffer::gy] = size_of(work.sum.x);
  bytes[Buffer::gb] = 4 * work.sum.out.cols;
  for (const Step& step : plan) {
    if (step.kernel != Kernel::final_sum) continue;
    bytes[Buffer::sums] = bytes[Buffer::all_scratch] =
        4 * work.sum.out.cols * step.as<SumsStep>().runs;
  }
  return all;
}

// Number of passes of a row quantiser over its rows.
int row_passes_of(const Step& step) {
  const bool twice = step.kernel == Kernel::rows && step.as<RowsStep>().pass == Pass::both;
  return twice ? 2 : 1;
}

// Number of reads of g_y by a step.
int gy_passes_of(const Step& step) {
  if (!step.reads.has(Buffer::gy)) return 0;
  if (step.kernel == Kernel::rows) return row_passes_of(step);
  if (step.kernel == Kernel::grouped_amax || step.kernel == Kernel::grouped_codes) {
    const auto& small = step.as<GroupedStep>();
    return (small.rows.range.blocks > 0 ? 1 : 0) + (small.gradient.range.blocks > 0 ? 1 : 0);
  }
  return 1;
}

// Whether a step's operations are counted. A fixup's belong to the step that computes the tiles.
bool multiplies(const Step& step) {
  return step.kernel == Kernel::gemm_small ||
         (std::holds_alternative<ProductStep>(step.work) && step.kernel != Kernel::fill_zero &&
          step.kernel != Kernel::mma_fixup);
}

// ---- reasons in words --------------------------------------------------------------------------

// Names in the text of a reason: the array of a step, its row length and the contraction.
struct Names {
  const char *array, *length, *contraction;
};

Names names_of(const Step& step) {
  if (step.writes.has(Buffer::y)) return {"y", "out_features", "in_features"};
  if (step.writes.has(Buffer::gx)) return {"g_x", "in_features", "out_features"};
  if (step.writes.has(Buffer::gw)) return {"g_w", "in_features", "rows of tokens"};
  if (step.writes.has(Buffer::out)) return {"out", "N", "K"};
  if (step.reads.has(Buffer::gy)) return {"g_y", "out_features", ""};
  return {step.reads.has(Buffer::w) ? "w" : "x", "in_features", "K"};
}

std::string words(const char* text, const Step& step, const Reason& reason) {
  const Names names = names_of(step);
  std::string all;
  for (; *text != '\0'; ++text) {
    if (*text != '%') {
      all += *text;
      continue;
    }
    const char what = *++text;
    all += what == 'a'   ? names.array
           : what == 'f' ? names.length
           : what == 'k' ? names.contraction
           : what == 't' ? dtype_name(step.dtype)
           : what == 's' ? reason.name
                         : std::to_string(reason.number);
  }
  return all;
}

// Lists the kernels that the plan tried before a step's kernel, with their reasons. If two kernels
// share a reason and the second's cost text begins with the first's, only the second is listed.
void add_reasons(ExplainedStep& e, const Plan& plan, const Step& step) {
  std::string reason, slow;
  for (const Refusal& passed : plan.passed(step)) {
    const std::string why = words(passed.reason.why, step, passed.reason);
    if (passed.kernel != step.kernel) {
      e.passed_over.push_back(joined_text(info(passed.kernel).name, ": ", why));
    }
    if (passed.cost == nullptr) continue;
    const std::string cost = words(passed.cost, step, passed.reason);
    if (!slow.empty() && (why != reason || cost.compare(0, slow.size(), slow) != 0)) {
      e.slow += slow + ": " + reason + "; ";
    }
    slow = cost;
    reason = why;
  }
  if (!slow.empty()) e.slow += slow + ": " + reason;
}

std::string fixed(double value, const char* unit) {
  std::array<char, 48> text{};
  std::snprintf(text.data(), text.size(), "%.*f%s", value < 100 ? 1 : 0, value, unit);
  return text.data();
}

// Device of an explanation. `named` has its figures, or is null.
struct Target {
  const DeviceFacts& facts;
  const NamedDevice* named;
};

void add_steps(Explanation& all, const char* call, const Plan& plan, const Amounts& amounts,
               const NamedDevice* named) {
  for (const Step& step : plan) {
    ExplainedStep e;
    e.call = call;
    e.kernel = info(step.kernel).name;
    e.file = info(step.kernel).file;
    e.blocks = step.shape.blocks;
    e.threads = step.shape.threads * step.shape.rows;
    e.cluster = step.shape.cluster;
    e.shared_bytes = step.shape.shared_bytes;
    e.independent = step.independent;
    add_reasons(e, plan, step);
    const int passes = gy_passes_of(step);
    for (int b = 0; b < buffer_count; ++b) {
      const auto buffer = static_cast<Buffer>(b);
      const std::int64_t bytes = amounts.bytes[buffer];
      if (step.reads.has(buffer)) {
        e.reads.emplace_back(buffer_name(buffer));
        const bool is_x = buffer == Buffer::x || buffer == Buffer::w;
        e.bytes_read += bytes * (buffer == Buffer::gy ? passes : is_x ? row_passes_of(step) : 1);
      }
      if (step.writes.has(buffer)) {
        e.writes.emplace_back(buffer_name(buffer));
        e.bytes_written += bytes;
        if (multiplies(step)) e.operations += amounts.operations[buffer];
      }
    }
    if (step.kernel == Kernel::broadcast_scale) e.bytes_read = 4;  // the operand's single scale
    if (step.kernel == Kernel::zero) {
      e.bytes_written = static_cast<std::int64_t>(step.as<ZeroStep>().bytes);
    }
    all.gy_passes += passes;
    all.bytes_read += e.bytes_read;
    all.bytes_written += e.bytes_written;
    all.operations += e.operations;
    if (named != nullptr) {
      const double bytes = static_cast<double>(e.bytes_read + e.bytes_written) / named->bandwidth;
      all.floor_us += 1e6 * std::max(bytes, static_cast<double>(e.operations) / named->operations);
    }
    if (!e.slow.empty() && std::find(all.slow.begin(), all.slow.end(), e.slow) == all.slow.end()) {
      all.slow.push_back(e.slow);
    }
    all.steps.push_back(std::move(e));
  }
}

// Adds the steps of a call, and returns the size of its workspace.
std::size_t add_call(Explanation& all, const Target& target, Work work) {
  const Plan plan = plan_of(target.facts, work);
  add_steps(all, work.call, plan, amounts_of(work, plan), target.named);
  return take_scratch(work, nullptr, plan.scratch);
}

// ---- the forward product -----------------------------------------------------------------------

void add_forward(Explanation& all, const Target& target, const LinearShape& shape,
                 const BackwardLinearSpec& spec, const ExplainOptions& options) {
  const auto [L, O, I] = shape;
  ForwardCall call = forward_shape(options.forward, shape, options.dtype, options.compress,
                                   options.quantized_forward_weight);
  if (options.quantized_forward_weight && O > 0) {
    Work work{"quantize_forward_weight"};
    add_forward_operand(work, Source::w, call.w, options.forward, nullptr);
    add_call(all, target, work);
  }
  if (options.compress) {
    Work work{"quantize_forward_input"};
    add_forward_operand(work, Source::x, call.x, options.forward, nullptr);
    add_saved_x(work, {}, call.x, saved_shape(shape, spec), spec);
    add_call(all, target, work);
  }
  if (L == 0 || O == 0) return;
  if (options.bias) call.bias = shape_in(options.bias_dtype, 1, O);
  all.workspace = add_call(all, target, operands_of(call));
}

// Writes the device and the rates of the floor into `all`.
void set_device(Explanation& all, std::string_view device, const Target& target) {
  const auto& [facts, named] = target;
  const std::string gpu = named == nullptr ? "" : joined_text(named->gpu, ", ");
  all.device = joined_text(name_of(facts.arch), " (", gpu, facts.sm_count, " SMs)");
  for (int i = 0; i < feature_count; ++i) {
    const auto feature = static_cast<Feature>(i);
    if (facts.hardware.has(feature) && !facts.kernels.has(feature)) {
      all.lacks.emplace_back(feature_name(feature));
    }
  }
  if (device != name_of(facts.arch)) all.device = joined_text(device, ", ", all.device);
  if (named == nullptr) return;
  all.rates = joined_text(fixed(named->operations / 1e12, " TOPS"), " and ",
                          fixed(named->bandwidth / 1e12, " TB/s"), ", ", named->rates);
}

// ---- text --------------------------------------------------------------------------------------

std::string bytes_text(std::int64_t bytes) {
  const auto b = static_cast<double>(bytes);
  return bytes < 1000      ? std::to_string(bytes) + " B"
         : bytes < 1000000 ? fixed(b / 1e3, " kB")
                           : fixed(b / 1e6, " MB");
}

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
  return text.empty() ? "nothing" : text;
}

std::string padded(std::string text, std::size_t width) {
  if (text.size() < width) text.append(width - text.size(), ' ');
  return text;
}

std::string text_of(const Explanation& e, const std::string& title) {
  std::string text = title + ", on " + e.device + "\n";
  const auto add = [&](const auto&... parts) { text += joined_text(parts...); };
  if (!e.lacks.empty()) add("no kernels in this build: ", joined(e.lacks), "\n");
  std::string call;
  int number = 0;
  for (const ExplainedStep& step : e.steps) {
    if (step.call != call) text += "\n" + (call = step.call) + "\n";
    const std::string grid = step.blocks == 0 ? "" : joined_text(step.blocks, " x ", step.threads);
    add(padded(padded(joined_text(" ", ++number), 4) + step.kernel, 44), padded(grid, 14),
        padded(step.cluster > 1 ? joined_text("clusters of ", step.cluster) : "", 16),
        padded("reads " + bytes_text(step.bytes_read), 16),
        padded("writes " + bytes_text(step.bytes_written), 17), joined(step.reads), " -> ",
        joined(step.writes), step.independent ? "  (overlaps)" : "", "\n");
    if (!step.slow.empty()) add("    slow: ", step.slow, "\n");
    for (const std::string& passed : step.passed_over) {
      const bool told = step.slow.find(passed.substr(passed.find(": "))) != std::string::npos;
      if (!told) add("    not ", passed, "\n");
    }
  }
  text += "\n";
  if (e.gy_passes > 0) {
    add("g_y is read ", e.gy_passes, e.gy_passes == 1 ? " time; " : " times; ");
  }
  add("in all ", bytes_text(e.bytes_read), " read, ", bytes_text(e.bytes_written), " written, ",
      fixed(static_cast<double>(e.operations) / 1e9, ""),
      " billion operations\nworkspace: ", bytes_text(static_cast<std::int64_t>(e.workspace)), "\n");
  if (e.floor_us > 0) add("floor: ", fixed(e.floor_us, " us"), " at ", e.rates, "\n");
  return text;
}

// ---- the call ----------------------------------------------------------------------------------

// Calls call(target) for a named architecture or a present device.
void with_device(std::string_view device, bool wgmma,
                 const std::function<void(const Target&)>& call) {
  for (const NamedDevice& named : named_devices) {
    if (device != name_of(named.arch)) continue;
    const Model model;
    return call({facts_of(named, model, wgmma), &named});
  }
  const std::string_view prefix = "cuda:";
  const std::string_view digits =
      device.substr(0, prefix.size()) == prefix ? device.substr(prefix.size()) : "";
  const bool number =
      !digits.empty() && digits.size() < 4 &&
      std::all_of(digits.begin(), digits.end(), [](char c) { return c >= '0' && c <= '9'; });
  if (!number) {
    invalid(call_name, "device is '", device, "'; expected cuda:0, cuda:1, ", "... or one of ",
            joined(explain_devices()));
  }
  const Context context = Context::cuda(std::stoi(std::string(digits)), nullptr);
  with_device_facts(context, [&](const DeviceFacts& facts) {
    const auto* const named =
        std::find_if(std::begin(named_devices), std::end(named_devices),
                     [&](const NamedDevice& one) { return one.arch == facts.arch; });
    call({facts, named == std::end(named_devices) ? nullptr : named});
  });
}

}  // namespace

std::vector<std::string> explain_devices() {
  std::vector<std::string> names;
  for (const NamedDevice& device : named_devices) names.push_back(name_of(device.arch));
  return names;
}

Explanation explain(std::string_view device, const LinearShape& shape,
                    const BackwardLinearSpec& spec, const ExplainOptions& options) {
  if (!options.y && !options.compress && !options.gx && !options.gw && !options.gb) {
    invalid(call_name, "options request no output; set at least one of y, compress, gx, gw, gb");
  }
  for (const DType dtype : {options.dtype, options.gw_dtype, options.bias_dtype}) {
    if (!is_float(dtype)) {
      invalid(call_name, "dtype is ", dtype_name(dtype), "; expected float32, float16 or bfloat16");
    }
  }
  // Checks of the calls themselves.
  quantized_weight_bytes(shape.out_features, shape.in_features, spec);
  saved_layout(shape.tokens, shape.in_features, spec);
  if (options.y) forward_weight_bytes(shape.out_features, shape.in_features, options.forward);
  check_counted_sizes(call_name, {"tokens", "out_features", "in_features"},
                      {shape.tokens, shape.out_features, shape.in_features});

  Explanation all;
  with_device(device, options.wgmma, [&](const Target& target) {
    const auto [L, O, I] = shape;
    set_device(all, device, target);
    if (options.y) add_forward(all, target, shape, spec, options);
    const bool elements = L > 0 && I > 0;
    if (options.compress && !options.y) {
      Work work{"compress_activation"};
      add_saved_x(work, {}, shape_in(options.dtype, L, I), saved_shape(shape, spec), spec);
      add_call(all, target, work);
    }
    if (!options.gx && !options.gw && !options.gb) return;
    BackwardCall call = backward_shape(spec, shape, options.dtype, options.gw_dtype, options.gx,
                                       options.gw, options.gb);
    call.accumulate = options.accumulate;
    if (options.quantized_weight && options.gx && elements && O > 0) {
      Work work{"quantize_weight"};
      add_weight(work, call.w, spec, nullptr);
      call.quantized = work.operands.at(Source::w, Along::column).out;
      add_call(all, target, work);
    }
    all.workspace = std::max(all.workspace, add_call(all, target, operands_of(call)));
  });
  all.text =
      text_of(all, joined_text(shape.tokens, " tokens, ", shape.in_features, " -> ",
                               shape.out_features, " features, ", dtype_name(options.dtype)));
  return all;
}

Explanation explain_gemm(std::string_view device, std::int64_t m, std::int64_t n, std::int64_t k,
                         const ExplainGemmOptions& options) {
  const char* const call = "explain_gemm";
  check_counted_sizes(call, {"m", "n", "k"}, {m, n, k});
  const bool bare = options.out_dtype == DType::i32;
  if (!bare && !is_float(options.out_dtype)) {
    invalid(call, "out_dtype is ", dtype_name(options.out_dtype),
            "; expected float32, float16, bfloat16 or int32");
  }
  Explanation all;
  with_device(device, options.wgmma, [&](const Target& target) {
    const DeviceFacts& facts = target.facts;
    const std::int64_t size = element_bytes(options.out_dtype);
    const std::int64_t row_bytes = options.int4 ? (k + 1) / 2 : k;
    ProductShape p{m, n, k};
    p.rows_aligned = k % 16 == 0;
    p.scaled = !bare;
    p.one_scale_a = m == 1;
    p.one_scale_b = n == 1;
    p.accumulate = options.accumulate;
    p.out = {options.out_dtype, true, n * size % 16 == 0};
    set_device(all, device, target);
    const Plan plan =
        options.int4 ? plan_gemm_int4(facts, p, row_bytes % 16 == 0) : plan_gemm(facts, p);
    Amounts amounts;
    amounts.bytes[Buffer::a] = m * row_bytes;
    amounts.bytes[Buffer::b] = n * row_bytes;
    amounts.bytes[Buffer::unpacked_a] = m * k;
    amounts.bytes[Buffer::unpacked_b] = n * k;
    amounts.bytes[Buffer::out] = m * n * size;
    amounts.bytes[Buffer::broadcast_a] = 4 * m;
    amounts.bytes[Buffer::broadcast_b] = 4 * n;
    amounts.operations[Buffer::out] = 2 * m * n * k;
    add_steps(all, options.int4 ? "gemm_int4" : "gemm_int8", plan, amounts, target.named);
    WorkspaceCursor cursor;
    cursor.take<char>(static_cast<std::int64_t>(gemm_workspace(facts, m, n, k)));
    cursor.take<std::int8_t>(m * k);
    cursor.take<std::int8_t>(n * k);
    all.workspace = cursor.bytes();
  });
  all.text = text_of(all, joined_text(m, " x ", n, " x ", k, options.int4 ? ", INT4, " : ", INT8, ",
                                      dtype_name(options.out_dtype), " out"));
  return all;
}

}  // namespace hot
