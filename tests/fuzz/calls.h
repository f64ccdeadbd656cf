// All calls of libhot with the arguments of fuzz.h. `Api` is the C++ API or the C ABI, so that both
// targets have the same arguments and properties.
#pragma once

#include "fuzz.h"

namespace hot_fuzz {

// Breaks a compressed activation or a quantised weight (bytes and their description).
template <class Kept>
void spoil_bytes(Input& input, Memory& memory, Kept& kept) {
  input.one_of({[&] { kept.bytes = static_cast<std::size_t>(input.wild()); },
                [&] { kept.data = nullptr; },
                [&] {
                  if (kept.bytes == 0) return;
                  kept.data = memory.bytes(kept.bytes, false, 17);
                  memory.must_fail("kept bytes that are not aligned were taken");
                }});
}

inline void spoil_saved(Input& input, Memory& memory, hot::ConstSavedActivation& saved) {
  const auto bytes = [&] { spoil_bytes(input, memory, saved); };
  input.one_of({[&] { saved.tokens = input.wild(); }, [&] { saved.in_features = input.wild(); },
                [&] { saved.format = input.any<std::uint64_t>(); },
                [&] { saved.key.stream = input.any<std::uint32_t>(); },
                [&] {
                  saved.key.counter =
                      reinterpret_cast<const std::uint64_t*>(memory.bytes(16, false, 17));
                  memory.must_fail("a counter that is not aligned was taken");
                },
                bytes, bytes});
}

// Executor that runs the calls on the caller's thread in sequence, or none.
inline void calls_of_an_executor(void* calls, int threads, hot::Executor::Work work, void* data) {
  for (int i = 0; i < threads && i < *static_cast<int*>(calls); ++i) work(data);
}

template <class Api>
class Calls {
 public:
  explicit Calls(Input& input) : input_(input), api_(input), memory_(input) {}

  void run() {
    // backward and forward have the most arguments, so they come more often.
    constexpr void (Calls::* calls[])() = {
        &Calls::fwht,          &Calls::hla,      &Calls::quantize, &Calls::dequantize,
        &Calls::pack,          &Calls::gemm,     &Calls::compress, &Calls::quantize_weight,
        &Calls::backward,      &Calls::backward, &Calls::backward, &Calls::sizes,
        &Calls::decompress,    &Calls::forward,  &Calls::forward,  &Calls::forward_weight,
        &Calls::forward_input, &Calls::blocks,   &Calls::contexts};
    (this->*calls[input_.from(0, 18)])();
  }

 private:
  Outcome check(const std::function<Outcome()>& call) {
    return memory_.check([&] {
      api_.begin();
      const Outcome outcome = call();
      // The API could not pass the argument on.
      if (outcome.ok() && api_.refused() != nullptr) broken(api_.refused());
      return outcome;
    });
  }

  // Result of a separate call with valid memory, or `failed` if it refuses.
  template <class Ask>
  std::size_t asked(const Ask& ask, std::size_t failed = 0) {
    try {
      return static_cast<std::size_t>(ask());
    } catch (const hot::Error&) {
      return failed;
    }
  }

  // Error text without the name of the call.
  static std::string reason(const std::string& text) {
    const std::size_t colon = text.find(": ");
    return colon == std::string::npos ? text : text.substr(colon);
  }

  // One of three values, or rarely any number.
  template <class Enum>
  Enum some_enum() {
    return static_cast<Enum>(input_.rarely() ? input_.any<std::uint8_t>() : input_.from(0, 2));
  }

  void fwht() {
    const int dims = input_.from(1, 4);
    const int block = input_.rarely() ? input_.wild_int() : 1 << input_.from(0, 7);
    const int axis = input_.rarely() ? input_.wild_int() : input_.from(-dims, dims - 1);
    std::vector<std::int64_t> shape;
    for (int d = 0; d < dims; ++d) shape.push_back(input_.from(0, 6));
    const int along = axis < 0 ? axis + dims : axis;
    if (axis >= -dims && axis < dims && block > 0 && block <= 128) {
      shape[static_cast<std::size_t>(along)] = block * input_.from(0, 3);
    }
    const TensorView x = memory_.array(shape, some_float(input_), false);
    const TensorView out =
        input_.rarely(8) ? memory_.same_place(x) : memory_.array(shape, some_float(input_), true);
    memory_.in_place_is_allowed();
    check([&] { return api_.fwht(x, axis, block, out); });
  }

  void hla() {
    const auto spec = some_spec(input_);
    const std::int64_t tokens = some_tokens(input_, spec), cols = input_.size();
    const auto rows =
        static_cast<std::int64_t>(asked([&] { return hot::hla_rows(tokens, spec.low_rank); }, 4));
    const TensorView x = memory_.array({tokens, cols}, some_float(input_), false);
    const TensorView out = memory_.array({rows, cols}, some_float(input_), true);
    const auto side = static_cast<hot::Side>(input_.from(0, 1));
    check([&] { return api_.hla(x, spec, side, out); });
  }

  void quantize() {
    hot::QuantSpec spec;
    spec.bits = input_.rarely() ? input_.wild_int() : input_.flip() ? 4 : 8;
    spec.scale = some_enum<hot::Granularity>();
    spec.rounding = some_enum<hot::Rounding>();
    const std::int64_t rows = input_.size(), cols = input_.size();
    const bool packed = input_.flip();
    const TensorView x = memory_.array({rows, cols}, some_float(input_), false);
    const TensorView q = memory_.array({rows, packed ? (cols + 1) / 2 : cols},
                                       packed ? DType::i4x2 : DType::i8, true);
    const TensorView scale =
        memory_.array({hot::scale_count(rows, cols, spec.scale)}, DType::f32, true);
    check([&] { return api_.quantize(x, spec, q, scale); });
  }

  void dequantize() {
    const std::int64_t rows = input_.size(), cols = input_.size();
    const bool packed = input_.flip();
    const auto granularity = some_enum<hot::Granularity>();
    const TensorView q = memory_.array({rows, packed ? (cols + 1) / 2 : cols},
                                       packed ? DType::i4x2 : DType::i8, false);
    const TensorView scale =
        memory_.array({hot::scale_count(rows, cols, granularity)}, DType::f32, false);
    const TensorView out = memory_.array({rows, cols}, some_float(input_), true);
    check([&] { return api_.dequantize(q, scale, granularity, out); });
  }

  void pack() {
    const std::int64_t rows = input_.size(), cols = input_.size();
    const bool unpack = input_.flip();
    const std::vector<std::int64_t> bytes = {rows, (cols + 1) / 2}, values = {rows, cols};
    const TensorView from =
        memory_.array(unpack ? bytes : values, unpack ? DType::i4x2 : DType::i8, false);
    const TensorView to =
        memory_.array(unpack ? values : bytes, unpack ? DType::i8 : DType::i4x2, true);
    check([&] { return unpack ? api_.unpack_int4(from, to) : api_.pack_int4(from, to); });
  }

  void blocks() {
    const std::int64_t n = input_.size() * input_.from(1, 9), parts = input_.from(1, 5);
    const std::int64_t bytes = ((n + parts - 1) / parts + 63) / 64 * 68;
    const DType byte = input_.flip() ? DType::i8 : DType::i4x2;
    const bool sum = input_.flip();
    const TensorView values = memory_.array({n}, some_float(input_), sum);
    if (sum) {
      const TensorView wire = memory_.array({input_.from(1, 4), parts, bytes}, byte, false);
      check([&] { return api_.sum_blocks(wire, 0.5F, values); });
    } else {
      const auto rounding = some_enum<hot::Rounding>();
      const TensorView wire = memory_.array({parts, bytes}, byte, true);
      check([&] { return api_.encode_blocks(values, rounding, wire); });
    }
  }

  void gemm() {
    const std::int64_t m = input_.size(), n = input_.size(), k = input_.size();
    const bool packed = input_.flip(), bare = input_.rarely(4);
    const std::int64_t width = packed ? (k + 1) / 2 : k;
    const DType dtype = packed ? DType::i4x2 : DType::i8;
    const TensorView a = memory_.array({m, width}, dtype, false);
    const TensorView b = memory_.array({n, width}, dtype, false);
    TensorView a_scale{}, b_scale{};
    if (!bare || input_.rarely()) {
      a_scale = memory_.array({input_.flip() ? 1 : m}, DType::f32, false);
      b_scale = memory_.array({input_.flip() ? 1 : n}, DType::f32, false);
    }
    const TensorView out = memory_.array({m, n}, bare ? DType::i32 : some_float(input_), true);
    hot::GemmSpec spec;
    spec.divisor = input_.rarely() ? input_.wild_int() : bare ? 1 : 1 << input_.from(0, 8);
    spec.accumulate = !bare && input_.flip();
    const std::int64_t said = input_.rarely() ? input_.wild() : k;
    // Uses the fields of the views, since one of them may be broken.
    const auto workspace = memory_.workspace(asked([&] {
      return hot::gemm_workspace(api_.context(), a.shape[0], b.shape[0],
                                 packed ? said : a.shape[1]);
    }));
    check([&] {
      return packed ? api_.gemm_int4(a, b, said, a_scale, b_scale, spec, out, workspace)
                    : api_.gemm_int8(a, b, a_scale, b_scale, spec, out, workspace);
    });
  }

  // Shape [rows, cols], or with rows split into two or three dimensions.
  std::vector<std::int64_t> batched(std::int64_t rows, std::int64_t cols) {
    if (rows % 2 != 0 || !input_.rarely(3)) return {rows, cols};
    if (input_.flip()) return {2, rows / 2, cols};
    return {rows / 2, 1, 2, cols};
  }

  void compress() {
    const auto spec = some_spec(input_);
    const std::int64_t tokens = some_tokens(input_, spec), in = input_.size();
    const TensorView x = memory_.array(batched(tokens, in), some_float(input_), false);
    std::size_t size = asked([&] { return hot::saved_layout(tokens, in, spec).bytes; }, 64);
    const std::size_t align = input_.rarely() ? 1 : 16;
    const std::size_t more = input_.rarely() ? 5 : 0;
    if (size > 0 && input_.rarely()) size = input_.from<std::size_t>(0, size - 1);
    hot::SavedActivation saved{memory_.bytes(size + more, true, align), size + more};
    if (input_.rarely(40)) saved.data = nullptr;
    const auto workspace = memory_.workspace(asked(
        [&] { return hot::compress_activation_workspace(api_.context(), tokens, in, spec); }));
    check([&] { return api_.compress_activation(x, spec, saved, workspace); });
  }

  hot::ConstSavedActivation some_saved(std::int64_t tokens, std::int64_t in,
                                       const hot::BackwardLinearSpec& spec) {
    const std::size_t bytes = asked([&] { return hot::saved_layout(tokens, in, spec).bytes; }, 64);
    void* const data = memory_.bytes(bytes, false, 16);
    const hot::Key key{7, input_.any<std::uint8_t>(), 3, nullptr};
    return {data, bytes, tokens, in, key, asked([&] { return hot::saved_format(spec); }, 1)};
  }

  void decompress() {
    auto spec = some_spec(input_);
    if (!input_.rarely()) spec.low_rank = {};
    const std::int64_t tokens = some_tokens(input_, spec), in = input_.size();
    hot::ConstSavedActivation saved = some_saved(tokens, in, spec);
    std::int64_t first = input_.from<std::int64_t>(0, tokens);
    std::int64_t last = input_.from<std::int64_t>(first, tokens);
    const TensorView out = memory_.array({last - first, in}, some_float(input_), true);
    if (input_.rarely()) (input_.flip() ? first : last) = input_.wild();
    if (input_.rarely(12)) spoil_saved(input_, memory_, saved);
    check([&] { return api_.decompress_activation(saved, first, last, spec, out); });
  }

  // Memory for some bytes, sometimes too small, unaligned or null.
  template <class Kept>
  Kept some_room(std::size_t size) {
    if (input_.rarely()) size = input_.from<std::size_t>(0, size);
    Kept kept{memory_.bytes(size, true, input_.rarely() ? 1 : 16), size};
    if (input_.rarely(40)) kept.data = nullptr;
    return kept;
  }

  void quantize_weight() {
    const auto spec = some_spec(input_);
    const std::int64_t out = input_.size(), in = input_.size();
    const TensorView w = memory_.array({out, in}, some_float(input_), false);
    const auto kept = some_room<hot::QuantizedWeight>(
        asked([&] { return hot::quantized_weight_bytes(out, in, spec); }, 64));
    const auto workspace = memory_.workspace(
        asked([&] { return hot::quantize_weight_workspace(api_.context(), out, in, spec); }));
    check([&] { return api_.quantize_weight(w, spec, kept, workspace); });
  }

  template <class Bytes, class Format>
  hot::ConstQuantizedWeight some_weight(const hot::LinearShape& shape, const Bytes& size,
                                        const Format& format) {
    const std::size_t bytes = asked(size, 64);
    void* const data = memory_.bytes(bytes, false, 16);
    return {data, bytes, shape.out_features, shape.in_features, asked(format, 1)};
  }

  void backward() {
    const auto spec = some_spec(input_);
    const hot::LinearShape shape{some_tokens(input_, spec), input_.size(), input_.size()};
    const bool want_gx = input_.flip(), want_gw = input_.flip(), want_gb = input_.flip();
    const bool quantized = input_.rarely(3), twist = input_.rarely(12);
    const TensorView gy =
        memory_.array(batched(shape.tokens, shape.out_features), some_float(input_), false);
    TensorView w{};
    hot::ConstQuantizedWeight kept{};
    if (want_gx && !quantized) {
      w = memory_.array({shape.out_features, shape.in_features}, some_float(input_), false);
    } else if (want_gx) {
      kept = some_weight(
          shape,
          [&] { return hot::quantized_weight_bytes(shape.out_features, shape.in_features, spec); },
          [&] { return hot::weight_format(spec); });
      if (twist && input_.flip()) {
        input_.one_of({[&] { kept.out_features = input_.wild(); },
                       [&] { kept.in_features = input_.wild(); },
                       [&] { kept.format = input_.any<std::uint64_t>(); },
                       [&] { spoil_bytes(input_, memory_, kept); }});
      }
    }
    hot::ConstSavedActivation saved{};
    if (want_gw) {
      saved = some_saved(shape.tokens, shape.in_features, spec);
      if (twist && input_.flip()) spoil_saved(input_, memory_, saved);
    }
    TensorView gx{}, gw{}, gb{};
    const auto output = [&](bool want, TensorView& view, const std::vector<std::int64_t>& sizes) {
      if (want) view = memory_.array(sizes, some_float(input_), true);
      return want ? &view : nullptr;
    };
    const std::vector<std::int64_t> none;
    hot::BackwardOutputs out;
    out.gx = output(want_gx, gx, want_gx ? batched(shape.tokens, shape.in_features) : none);
    out.gw = output(want_gw, gw, {shape.out_features, shape.in_features});
    out.gb = output(want_gb, gb, {shape.out_features});
    out.accumulate = input_.flip();
    const auto needed = asked([&] {
      return hot::backward_linear_workspace(api_.context(), shape, spec, want_gx, want_gw);
    });
    const hot::Workspace workspace = memory_.workspace(needed, false);
    const Outcome support = api_.supported(shape, spec);
    const Outcome outcome = check([&] {
      return quantized ? api_.backward(gy, kept, saved, spec, out, workspace)
                       : api_.backward(gy, w, saved, spec, out, workspace);
    });
    if (memory_.spoiled() || workspace.bytes < needed || twist || api_.refused() != nullptr) return;
    // Only the spec and the shape can be wrong, so the call must agree with `supported`.
    if (!want_gx && !want_gw && !want_gb) {
      if (outcome.ok()) broken("a call without an output was carried out");
    } else if (outcome.ok() != support.ok()) {
      broken("supported says \"" + support.text + "\", backward_linear \"" + outcome.text + "\"");
    } else if (!support.ok() && !want_gw && !quantized &&
               reason(outcome.text) != reason(support.text)) {
      broken("supported says \"" + support.text + "\", backward_linear \"" + outcome.text + "\"");
    }
  }

  hot::ForwardLinearSpec some_forward_spec() {
    return {input_.rarely() ? input_.wild_int() : 1 << input_.from(0, 8)};
  }

  void forward_weight() {
    const auto spec = some_forward_spec();
    const std::int64_t out = input_.size(), in = input_.size();
    const TensorView w = memory_.array({out, in}, some_float(input_), false);
    const auto kept = some_room<hot::QuantizedWeight>(
        asked([&] { return hot::forward_weight_bytes(out, in, spec); }, 64));
    check([&] { return api_.quantize_forward_weight(w, spec, kept); });
  }

  void forward_input() {
    const auto forward_spec = some_forward_spec();
    const auto spec = some_spec(input_);
    const bool keep = input_.flip();
    const std::int64_t tokens = keep ? some_tokens(input_, spec) : input_.size();
    const std::int64_t in = input_.size();
    const TensorView x = memory_.array(batched(tokens, in), some_float(input_), false);
    const auto out = some_room<hot::QuantizedInput>(
        asked([&] { return hot::forward_input_bytes(tokens, in, forward_spec); }, 64));
    if (!keep) {
      check([&] { return api_.quantize_forward_input(x, forward_spec, out); });
      return;
    }
    const auto saved = some_room<hot::SavedActivation>(
        asked([&] { return hot::saved_layout(tokens, in, spec).bytes; }, 64));
    const auto workspace = memory_.workspace(asked(
        [&] { return hot::compress_activation_workspace(api_.context(), tokens, in, spec); }));
    check(
        [&] { return api_.quantize_forward_input(x, forward_spec, out, spec, saved, workspace); });
  }

  hot::ConstQuantizedInput some_quantized_input(const hot::LinearShape& shape,
                                                const hot::ForwardLinearSpec& spec, bool twist) {
    hot::ConstQuantizedInput x{};
    x.bytes =
        asked([&] { return hot::forward_input_bytes(shape.tokens, shape.in_features, spec); }, 64);
    x.data = memory_.bytes(x.bytes, false, 16);
    x.tokens = shape.tokens;
    x.in_features = shape.in_features;
    x.format = asked([&] { return hot::forward_input_format(spec); }, 1);
    if (twist) {
      input_.one_of({[&] { x.tokens = input_.wild(); }, [&] { x.in_features = input_.wild(); },
                     [&] { x.format = input_.any<std::uint64_t>(); },
                     [&] { spoil_bytes(input_, memory_, x); }});
    }
    return x;
  }

  void forward() {
    const auto spec = some_forward_spec();
    const hot::LinearShape shape{input_.size(), input_.size(), input_.size()};
    const bool quantized = input_.rarely(3), twist = input_.rarely(12);
    const bool quantized_x = input_.rarely(3);
    TensorView x{}, w{}, bias{};
    hot::ConstQuantizedInput codes{};
    if (quantized_x) {
      codes = some_quantized_input(shape, spec, twist);
    } else {
      x = memory_.array(batched(shape.tokens, shape.in_features), some_float(input_), false);
    }
    hot::ConstQuantizedWeight kept{};
    if (!quantized) {
      w = memory_.array({shape.out_features, shape.in_features}, some_float(input_), false);
    } else {
      kept = some_weight(
          shape,
          [&] { return hot::forward_weight_bytes(shape.out_features, shape.in_features, spec); },
          [&] { return hot::forward_weight_format(spec); });
      if (twist) spoil_bytes(input_, memory_, kept);
    }
    if (input_.flip()) bias = memory_.array({shape.out_features}, some_float(input_), false);
    const TensorView y =
        memory_.array(batched(shape.tokens, shape.out_features), some_float(input_), true);
    const auto needed = asked([&] {
      return hot::forward_linear_workspace(api_.context(), shape, spec, quantized, quantized_x);
    });
    const hot::Workspace workspace = memory_.workspace(needed, false);
    const bool supported = hot::forward_supported(api_.context(), shape, spec).ok;
    const auto product = [&](const auto& left) {
      return quantized ? api_.forward(left, kept, bias, spec, y, workspace)
                       : api_.forward(left, w, bias, spec, y, workspace);
    };
    const Outcome outcome = check([&] { return quantized_x ? product(codes) : product(x); });
    if (memory_.spoiled() || workspace.bytes < needed || twist || api_.refused() != nullptr) return;
    if (outcome.ok() != supported) broken("forward_supported disagrees: " + outcome.text);
  }

  // Any numbers must give an error or a sufficient size.
  void sizes() {
    const auto spec = some_spec(input_);
    const auto number = [&] { return input_.flip() ? input_.wild() : input_.size(); };
    const hot::LinearShape s{number(), number(), number()};
    const Wide tokens = s.tokens, out = s.out_features, in = s.in_features;
    const auto holds = [](const char* what, const Outcome& outcome, Wide got, Wide least) {
      if (outcome.ok() && got < least) broken(std::string(what) + " is too small");
    };
    std::size_t bytes = 0;
    const auto ask = [&](const std::function<Outcome()>& call) {
      constexpr std::size_t poison = 0xA5A5A5A5A5A5A5A5;
      bytes = poison;
      const Outcome outcome = check(call);
      if (!outcome.ok() && bytes != poison) broken("a size was written before the error");
      return outcome;
    };
    Outcome outcome =
        ask([&] { return api_.gemm_workspace(s.tokens, s.out_features, s.in_features, bytes); });
    holds("gemm_workspace", outcome, bytes, tokens * in + out * in);
    outcome = ask([&] { return api_.weight_bytes(s.out_features, s.in_features, spec, bytes); });
    holds("quantized_weight_bytes", outcome, bytes, in * (out + 4));
    ask([&] { return api_.weight_workspace(s.out_features, s.in_features, spec, bytes); });
    ask([&] { return api_.compress_workspace(s.tokens, s.in_features, spec, bytes); });
    const bool gx = input_.flip(), gw = input_.flip();
    outcome = ask([&] { return api_.backward_workspace(s, spec, gx, gw, bytes); });
    const bool product = gx && tokens > 0 && in > 0;  // an empty g_x needs nothing
    holds("backward_linear_workspace", outcome, bytes, product ? tokens * out + in * out : 0);

    std::int64_t rows = -1;
    outcome = check([&] { return api_.hla_rows(s.tokens, spec, rows); });
    if (outcome.ok() && (spec.low_rank.basis == hot::Basis::full
                             ? rows != s.tokens
                             : rows < 0 || Wide{rows} * spec.low_rank.block < tokens)) {
      broken("hla_rows does not fit");
    }
    if (gw && outcome.ok()) {
      const Wide k = rows;
      outcome = ask([&] { return api_.backward_workspace(s, spec, false, true, bytes); });
      holds("backward_linear_workspace of g_w", outcome, bytes, in > 0 ? out * k : 0);
    }
    hot::SavedLayout l;
    outcome = check([&] { return api_.saved_layout(s.tokens, s.in_features, spec, l); });
    if (outcome.ok()) {
      const bool int8 = spec.storage == hot::Storage::int8;
      const Wide row = int8 ? Wide{rows} : (tokens + 1) / 2;
      const Wide exponents = spec.equalize_tokens ? tokens : Wide{0};
      if (Wide{l.channels} != in || l.row_bytes < row || l.row_bytes % 16 != 0 ||
          Wide{l.scale_offset} != in * l.row_bytes || l.k > l.k_padded ||
          Wide{l.exponent_offset} != Wide{l.scale_offset} + Wide{l.scales} * (int8 ? 4 : 2) ||
          Wide{l.bytes} != Wide{l.exponent_offset} + exponents ||
          (!int8 && Wide{l.scales} != in * ((tokens + 63) / 64))) {
        broken("saved_layout does not fit");
      }
    }
    const Outcome supported = check([&] { return api_.supported(s, spec); });
    outcome = ask([&] { return api_.backward_workspace(s, spec, true, true, bytes); });
    if (supported.ok() != outcome.ok()) {
      broken("supported says \"" + supported.text + "\", backward_linear_workspace \"" +
             outcome.text + "\"");
    }
  }

  void contexts() {
    const hot::Key key{input_.any<std::uint64_t>(), input_.any<std::uint64_t>(),
                       input_.flip() ? input_.any<std::uint32_t>() : input_.from(0U, 8191U),
                       input_.flip() ? nullptr
                                     : reinterpret_cast<const std::uint64_t*>(memory_.bytes(
                                           32, false, input_.from<std::size_t>(1, 16)))};
    const bool good_key =
        key.stream < 8192 && reinterpret_cast<std::uintptr_t>(key.counter) % 8 == 0;
    if (check([&] { return api_.with_key(key); }).ok() != good_key) {
      broken("a key that cannot be was taken, or a good one refused");
    }
    const int isa = input_.rarely(3) ? input_.wild_int() : input_.from(0, 3);
    const bool good_isa = isa >= 0 && isa <= static_cast<int>(hot::best_isa());
    if (isa >= 0 && isa < 256 && check([&] { return api_.with_isa(isa); }).ok() != good_isa) {
      broken("with_isa");
    }
    check([&] { return api_.with_arch(input_.wild_int()); });
    check([&] { return api_.with_sm_margin(input_.wild_int()); });
    const int threads = input_.wild_int();
    if (threads < 0 || threads > 1024) {  // none is started
      if (check([&] { return api_.cpu(threads); }).ok()) broken("a wild number of threads");
      if (check([&] { return api_.cpu_on(calls_of_an_executor, nullptr, threads); }).ok()) {
        broken("a wild number of threads of an executor");
      }
    } else if (check([&] { return api_.cpu_on(nullptr, nullptr, threads); }).ok()) {
      broken("an executor that runs nothing");
    }
    const std::string name = input_.flip() ? input_.text(12) : "paper";
    const bool known = contains(hot::recipe_names(), name.c_str());  // as a C string
    const Outcome outcome = check([&] { return api_.recipe(name.c_str()); });
    if (api_.refused() == nullptr && outcome.ok() != known) broken("recipe");
    check([&] {
      return api_.basis_order(static_cast<hot::Basis>(input_.from(0, 5)),
                              input_.flip() ? input_.wild_int() : 1 << input_.from(0, 7));
    });
  }

  Input& input_;
  Api api_;
  Memory memory_;
};

template <class Api>
int run(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  Calls<Api>(input).run();
  return 0;
}

// Contexts of all instruction sets, with one thread, or with an executor that calls twice (1) or
// never (2). The target does not test for races.
inline const hot::Context& context_with(int isa, int executor = 0) {
  static const std::vector<hot::Context> all = [] {
    std::vector<hot::Context> contexts;
    static int twice = 2, never = 0;
    const hot::Context bases[] = {hot::Context::cpu(1),
                                  hot::Context::cpu({calls_of_an_executor, &twice}, 3),
                                  hot::Context::cpu({calls_of_an_executor, &never}, 3)};
    for (int i = 0; i <= static_cast<int>(hot::best_isa()); ++i) {
      for (const hot::Context& base : bases) {
        contexts.push_back(base.with_isa(static_cast<hot::Isa>(i)));
      }
    }
    return contexts;
  }();
  return all[static_cast<std::size_t>(3 * isa + executor) % all.size()];
}

}  // namespace hot_fuzz
