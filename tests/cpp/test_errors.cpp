#include <fstream>
#include <map>
#include <sstream>

#include "config_fields.h"
#include "support.h"

using namespace hot_test;
using hot::ErrorCode;

namespace {

constexpr ErrorCode invalid = ErrorCode::invalid_argument;

// Arguments of a call of tests/errors.txt. Every array has its own part of `memory`.
struct Arguments {
  std::map<std::string, TensorView> views;
  std::map<std::string, std::int64_t> numbers;
  hot::BackwardLinearSpec spec;
  std::vector<char> memory = std::vector<char>(16 * room + 16, '\x3C');
  static constexpr std::int64_t room = 1 << 14;

  explicit Arguments(const std::string& line) {
    std::istringstream words(line);
    std::string word;
    while (words >> word) set(word);
    const auto or_else = [&](const char* name, std::int64_t other) {
      return numbers.count(name) != 0 ? numbers[name] : other;
    };
    const std::int64_t tokens = or_else("tokens", 20), features = or_else("in_features", 12);
    const auto bytes = static_cast<std::int64_t>(hot::saved_layout(tokens, features, spec).bytes);
    set("saved=i8(" + std::to_string(bytes) + ")");
    set("workspace=i8(" + std::to_string(room) + ")");
    numbers.emplace("format", static_cast<std::int64_t>(hot::saved_format(spec)));
    const hot::ForwardLinearSpec forward{static_cast<int>(or_else("block", 16))};
    numbers.emplace("input_format", static_cast<std::int64_t>(hot::forward_input_format(forward)));
    const hot::WeightInt4Spec int4{forward, static_cast<int>(or_else("group", 32))};
    numbers.emplace("int4_format", static_cast<std::int64_t>(hot::weight_int4_format(int4)));
  }

  static DType dtype(const std::string& name) {
    static const std::map<std::string, DType> all{{"f32", DType::f32},   {"f16", DType::f16},
                                                  {"bf16", DType::bf16}, {"i8", DType::i8},
                                                  {"i32", DType::i32},   {"i4x2", DType::i4x2}};
    return all.at(name);
  }

  // Applies "name=value" or "array.part=value".
  void set(const std::string& word) {
    const std::size_t equals = word.find('=');
    const std::string value = word.substr(equals + 1);
    const std::string name = word.substr(0, equals), array = name.substr(0, name.find('.'));
    if (array == "spec") {
      hot::detail::with_field<hot::BackwardLinearSpec>(name.substr(5), [&](const auto& row) {
        hot::detail::set_field_text(row, value, row.get(spec));
      });
    } else if (array != name) {
      set_part(views.at(array), name.substr(array.size() + 1), value);
    } else if (const std::size_t open = value.find('('); open != std::string::npos) {
      TensorView& view = views[name];
      view.dtype = dtype(value.substr(0, open));
      std::istringstream sizes(value.substr(open + 1));
      for (char comma = 0; sizes >> view.shape[view.ndim]; sizes >> comma) ++view.ndim;
      for (int i = view.ndim - 1; i >= 0; --i) {
        view.stride[i] = i == view.ndim - 1 ? 1 : view.stride[i + 1] * view.shape[i + 1];
      }
      view.data = aligned16(memory.data()) + static_cast<std::int64_t>(views.size() - 1) * room;
    } else {
      numbers[name] = std::stoll(value);
    }
  }

  void set_part(TensorView& view, const std::string& part, const std::string& value) {
    const bool relative = value[0] == '+';
    if (part == "dtype") {
      view.dtype = dtype(value);
    } else if (part == "device") {
      view.device = {hot::Device::Type::cuda, std::stoi(value)};
    } else if (part == "ndim") {
      view.ndim = std::stoi(value);
    } else if (part == "data") {
      const std::size_t plus = value.find('+');
      const std::string other = value.substr(0, plus);
      if (!relative) view.data = value == "null" ? nullptr : views.at(other).data;
      if (plus != std::string::npos) {
        view.data = static_cast<char*>(view.data) + std::stoll(value.substr(plus + 1));
      }
    } else {
      std::int64_t& number = (part[1] == 'h' ? view.shape : view.stride)[part.back() - '0'];
      number = (relative ? number : 0) + std::stoll(value);
    }
  }

  hot::Workspace workspace() { return {views["workspace"].data, bytes("workspace")}; }
  std::size_t bytes(const char* name) { return static_cast<std::size_t>(views[name].shape[0]); }
  hot::ConstSavedActivation saved() {
    return {views["saved"].data,
            bytes("saved"),
            numbers["tokens"],
            numbers["in_features"],
            {},
            static_cast<std::uint64_t>(numbers["format"])};
  }
};

void call(const std::string& name, Arguments& t) {
  auto& v = t.views;
  const auto number = [&](const char* key) { return static_cast<int>(t.numbers.at(key)); };
  const hot::Context context = cpu();
  const auto scale = [&] { return static_cast<hot::Granularity>(number("granularity")); };
  if (name == "fwht") {
    hot::fwht(context, v["x"], number("axis"), number("block"), v["out"]);
  } else if (name == "hla") {
    hot::hla(context, v["x"], t.spec.low_rank, hot::Side::activation, v["out"]);
  } else if (name == "quantize") {
    const auto rounding = static_cast<hot::Rounding>(number("rounding"));
    hot::quantize(context, v["x"], {number("bits"), scale(), rounding}, v["q"], v["scale"]);
  } else if (name == "dequantize") {
    hot::dequantize(context, v["q"], v["scale"], scale(), v["out"]);
  } else if (name == "pack_int4") {
    hot::pack_int4(context, v["q"], v["out"]);
  } else if (name == "unpack_int4") {
    hot::unpack_int4(context, v["packed"], v["out"]);
  } else if (name == "encode_blocks") {
    hot::encode_blocks(context, v["x"], static_cast<hot::Rounding>(number("rounding")), v["wire"]);
  } else if (name == "sum_blocks") {
    hot::sum_blocks(context, v["wire"], static_cast<float>(number("factor")), v["out"]);
  } else if (name == "gemm_int8") {
    hot::gemm_int8(context, v["a"], v["b"], v["a_scale"], v["b_scale"], {number("divisor")},
                   v["out"], t.workspace());
  } else if (name == "gemm_int4") {
    hot::gemm_int4(context, v["a"], v["b"], t.numbers["k"], v["a_scale"], v["b_scale"],
                   {number("divisor")}, v["out"], t.workspace());
  } else if (name == "compress_activation") {
    hot::compress_activation(context, v["x"], t.spec, {v["saved"].data, t.bytes("saved")}, {});
  } else if (name == "decompress_activation") {
    hot::decompress_activation(context, t.saved(), t.numbers["first"], t.numbers["last"], t.spec,
                               v["out"]);
  } else if (name == "forward_linear") {
    const hot::ForwardLinearSpec forward{number("block")};
    if (v.count("codes") == 0) {
      hot::forward_linear(context, v["x"], v["w"], v["bias"], forward, v["y"], t.workspace());
      return;
    }
    const hot::ConstQuantizedInput x{v["codes"].data, t.bytes("codes"), t.numbers["tokens"],
                                     t.numbers["in_features"],
                                     static_cast<std::uint64_t>(t.numbers["input_format"])};
    hot::forward_linear(context, x, v["w"], v["bias"], forward, v["y"], t.workspace());
  } else if (name == "quantize_forward_input") {
    hot::quantize_forward_input(context, v["x"], {number("block")},
                                {v["codes"].data, t.bytes("codes")}, t.spec,
                                {v["saved"].data, t.bytes("saved")}, t.workspace(), v["exponents"]);
  } else if (name == "quantize_weight_int4") {
    hot::quantize_weight_int4(context, v["w"], v["exponents"], {{number("block")}, number("group")},
                              {v["codes"].data, t.bytes("codes")});
  } else if (name == "expand_weight_int4") {
    const hot::ConstQuantizedWeight w{v["codes"].data, t.bytes("codes"), t.numbers["out_features"],
                                      t.numbers["in_features"],
                                      static_cast<std::uint64_t>(t.numbers["int4_format"])};
    hot::expand_weight_int4(context, w, {{number("block")}, number("group")},
                            {v["out"].data, t.bytes("out")});
  } else {
    ASSERT_EQ(name, "backward_linear");
    hot::backward_linear(context, v["gy"], v["w"], t.saved(), t.spec,
                         {&v["gx"], &v["gw"], &v["gb"], false}, t.workspace());
  }
}

}  // namespace

// Every row of the table fails with its words and leaves the memory unchanged.
TEST(Errors, table) {
  std::ifstream file(HOT_ERRORS);
  std::string line, name, good;
  int rows = 0;
  while (std::getline(file, line)) {
    if (line.empty() || line[0] == '#') continue;
    if (line[0] == '[') {
      name = line.substr(1, line.find(']') - 1);
      good = line.substr(line.find(']') + 1);
      Arguments arguments(good);
      EXPECT_NO_THROW(call(name, arguments)) << name;
      continue;
    }
    SCOPED_TRACE(name + ": " + line);
    Arguments arguments(good);
    const std::size_t bar = line.find(" | "), second = line.find(" | ", bar + 3);
    std::istringstream words(line.substr(line[0] == '*' ? 2 : 0, bar));
    for (std::string word; words >> word && word != "|";) arguments.set(word);
    std::vector<std::string> says;
    std::istringstream message(line.substr(bar + 3, second - bar - 3));
    for (std::string part; std::getline(message, part, ';');) {
      says.push_back(part.substr(part.find_first_not_of(' ')));
    }
    if (says[0] != "low_rank") says.push_back(name);
    const ErrorCode code = second == std::string::npos ? invalid : ErrorCode::workspace_too_small;
    const std::vector<char> before = arguments.memory;
    expect_error(code, says, [&] { call(name, arguments); });
    EXPECT_TRUE(arguments.memory == before) << "written before the error";
    ++rows;
  }
  EXPECT_GT(rows, 100);
}

TEST(Errors, recipes) {
  for (const char* name : {"best", "", "Default", "default "}) {
    expect_error(invalid, {"recipe", std::string("'") + name + "'", "'fast'"},
                 [&] { hot::recipe(name); });
  }
}

TEST(Errors, keys) {
  const std::uint64_t numbers[2] = {};
  const auto* odd =
      reinterpret_cast<const std::uint64_t*>(reinterpret_cast<const char*>(numbers) + 4);
  const auto with = [](hot::Key key) { return [key] { cpu().with_key(key); }; };
  expect_error(invalid, {"with_key", "key.stream", "8192"}, with({1, 2, 8192}));
  expect_error(invalid, {"with_key", "key.counter", "multiple of 8"}, with({1, 2, 3, odd}));
  Layer layer(16, 3, 4, {});
  layer.run(cpu());
  layer.key.counter = odd;
  expect_error(invalid, {"backward_linear", "saved.key.counter"}, [&] { layer.backward(cpu()); });
}

// Products of sizes and strides overflowed 64 bits and became small (found by tests/fuzz).
TEST(Errors, sizes_beyond_memory) {
  const std::int64_t limit = std::numeric_limits<std::int64_t>::max();
  const std::int64_t far = std::int64_t{1} << 40;
  const hot::Context context = cpu();
  const hot::BackwardLinearSpec spec{};
  expect_error(invalid, {"saved_layout", "tokens", "2^48"},
               [&] { hot::saved_layout(limit, 1, spec); });
  // 2^40 rows of 2^40 / 2 bytes: 2^79, which is 0 in 64 bits.
  expect_error(invalid, {"saved_layout", "in_features", "2^52"},
               [&] { hot::saved_layout(far, far, spec); });
  expect_error(invalid, {"quantized_weight_bytes", "2^52"},
               [&] { hot::quantized_weight_bytes(far, far, spec); });
  expect_error(invalid, {"gemm_workspace", "m", "k", "2^52"},
               [&] { hot::gemm_workspace(context, far, 1, far); });
  expect_error(invalid, {"backward_linear_workspace", "2^52"},
               [&] { hot::backward_linear_workspace(context, {far, far, 1}, spec, true, true); });
  expect_error(invalid, {"low_rank", "tokens"}, [&] { hot::hla_rows(limit, {}); });
  EXPECT_FALSE(hot::supported(context, {far, far, far}, spec).ok);
  EXPECT_TRUE(hot::supported(context, {std::int64_t{1} << 24, 1 << 15, 1 << 15}, spec).ok);
}

// A single row may have any stride.
TEST(Errors, a_stride_that_is_not_used) {
  const std::int64_t limit = std::numeric_limits<std::int64_t>::max();
  std::vector<float> memory(16);
  const TensorView x = hot::matrix(memory.data(), DType::f32, 1, 16, limit);
  EXPECT_NO_THROW(hot::fwht(cpu(), x, 1, 16, x));
  // Multiplied by the size of an element it overflowed (found by tests/fuzz under UBSan).
  const hot::BackwardLinearSpec spec{};
  alignas(16) char codes[1024];
  const std::size_t bytes = hot::quantized_weight_bytes(1, 16, spec);
  ASSERT_LE(bytes, sizeof codes);
  Scratch scratch(hot::quantize_weight_workspace(cpu(), 1, 16, spec));
  EXPECT_NO_THROW(hot::quantize_weight(cpu(), x, spec, {codes, bytes}, scratch.workspace()));
}

// An empty array with several leading dimensions may have any strides. The product of its strides
// and sizes overflowed (found by tests/fuzz under UBSan).
TEST(Errors, strides_of_an_empty_array) {
  const std::int64_t limit = std::numeric_limits<std::int64_t>::max();
  const hot::BackwardLinearSpec spec{};
  float one = 0;
  ConstTensorView x{&one, DType::f32, {}, 4, {3, 2, 2, 0}, {limit, limit / 2, limit - 5, limit}};
  const hot::SavedLayout layout = hot::saved_layout(12, 0, spec);
  alignas(16) char memory[16];
  Scratch scratch(hot::compress_activation_workspace(cpu(), 12, 0, spec));
  const hot::ConstSavedActivation saved =
      hot::compress_activation(cpu(), x, spec, {memory, layout.bytes}, scratch.workspace());
  EXPECT_EQ(saved.tokens, 12);
  EXPECT_EQ(saved.in_features, 0);
}

// Numbers outside an enumeration were once printed as `unknown` or mistaken for another value.
TEST(Errors, unknown_enumerations) {
  const auto refused = [](const char* name,
                          const std::function<void(hot::BackwardLinearSpec&)>& spoil) {
    hot::BackwardLinearSpec spec;
    spoil(spec);
    expect_error(invalid, {name, "unknown"}, [&] { hot::saved_layout(20, 12, spec); });
    EXPECT_FALSE(hot::supported(cpu(), {20, 10, 12}, spec).ok) << name;
  };
  using Spec = hot::BackwardLinearSpec;
  refused("gx_scale", [](Spec& s) { s.gx_scale = static_cast<hot::Granularity>(9); });
  refused("gw_scale", [](Spec& s) { s.gw_scale = static_cast<hot::Granularity>(9); });
  for (const int value : {2, 9}) {  // 2 was rht4
    refused("storage", [&](Spec& s) { s.storage = static_cast<hot::Storage>(value); });
  }
  refused("basis", [](Spec& s) {
    s.storage = hot::Storage::int8;
    s.low_rank.basis = static_cast<hot::Basis>(9);
  });
  refused("gx_rounding", [](Spec& s) { s.gx_rounding = static_cast<hot::Rounding>(9); });
  refused("gw_rounding", [](Spec& s) { s.gw_rounding = static_cast<hot::Rounding>(9); });
  Spec channels;
  channels.gx_scale = hot::Granularity::channel;
  expect_error(invalid, {"gx_scale", "channel"}, [&] { hot::saved_layout(20, 12, channels); });
}

TEST(Errors, missing_backends) {
  for (const hot::Isa isa : {hot::Isa::avx2, hot::Isa::avx512, hot::Isa::amx}) {
    if (static_cast<int>(isa) <= static_cast<int>(hot::best_isa())) continue;
    expect_error(ErrorCode::unsupported, {"isa", hot::isa_name(isa)}, [&] { cpu().with_isa(isa); });
  }
  if (!hot::built_with_cuda()) {
    expect_error(ErrorCode::unsupported, {"CUDA"}, [] { hot::Context::cuda(0, nullptr); });
  } else {
    expect_error(invalid, {"device", "999"}, [] { hot::Context::cuda(999, nullptr); });
  }
}
