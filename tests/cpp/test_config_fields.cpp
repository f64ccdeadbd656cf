// Table of configuration fields with an additional field, which all readers of the table must find.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "config_fields.h"
#include "support.h"

namespace {

enum class Sauce : std::uint8_t { none, mild, hot };
constexpr hot::detail::Choices<Sauce> sauces = {{Sauce::mild, "mild"}, {Sauce::hot, "hot"}};

struct WideSpec : hot::BackwardLinearSpec {
  Sauce sauce = Sauce::mild;
};
struct WideC : hot_spec {
  std::int32_t sauce;
};

// All rows of the table and a row of the test.
template <class Visit>
void for_each_field(hot::detail::FieldsOf<WideSpec>, Visit&& visit) {
  for_each_field(hot::detail::FieldsOf<hot::BackwardLinearSpec>{}, visit);
  visit(hot::detail::field<Sauce>(
      "sauce", [](auto& spec) -> auto& { return spec.sauce; }, &WideC::sauce, hot::detail::in_saved,
      sauces, "what goes with it"));
}

using hot_test::expect_error;
namespace detail = hot::detail;
constexpr auto invalid = hot::ErrorCode::invalid_argument;

TEST(ConfigFields, a_new_field_is_in_the_c_struct) {
  WideSpec spec;
  spec.sauce = Sauce::hot;
  spec.gx_bits = 4;
  spec.low_rank.layout = {3, 5, 1};
  WideC c{};
  detail::to_c(spec, c);
  EXPECT_EQ(c.sauce, 2);
  EXPECT_EQ(c.gx_bits, 4);
  const auto back = detail::from_c<WideSpec>("call", "spec", c);
  EXPECT_EQ(back.sauce, Sauce::hot);
  EXPECT_EQ(back.low_rank.layout.grid_w, 5);
  c.sauce = 0;  // an enumerator that the field does not accept
  expect_error(invalid, {"call", "spec.sauce is 0", "1 (mild), 2 (hot)"},
               [&] { detail::from_c<WideSpec>("call", "spec", c); });
}

TEST(ConfigFields, a_new_field_has_its_name_and_text) {
  WideSpec spec;
  std::string text;
  detail::with_field<WideSpec>("sauce", [&](const auto& row) {
    detail::set_field_text(row, "hot", row.get(spec));
    text = detail::field_text(row, row.get(spec));
  });
  EXPECT_EQ(text, "hot");
  EXPECT_EQ(spec.sauce, Sauce::hot);
  const auto set = [&](const char* name, const char* value) {
    return [&spec, name, value] {
      detail::with_field<WideSpec>(
          name, [&](const auto& row) { detail::set_field_text(row, value, row.get(spec)); });
    };
  };
  expect_error(invalid, {"sauce", "'none' is not one of 'mild', 'hot'"}, set("sauce", "none"));
  expect_error(invalid, {"no field 'source'", "hadamard_block, ", ", sauce"}, set("source", "hot"));
}

TEST(ConfigFields, a_new_field_is_checked_and_in_the_fingerprint) {
  WideSpec spec;
  detail::check_choices("call", spec);
  const auto print = [&](detail::Decides part) {
    detail::Fingerprint out;
    detail::add_fields(out, spec, part);
    return out.value();
  };
  const std::uint64_t saved = print(detail::in_saved);
  const std::uint64_t weight = print(detail::in_weight);
  spec.sauce = Sauce::hot;
  EXPECT_NE(print(detail::in_saved), saved);
  EXPECT_EQ(print(detail::in_weight), weight);
  spec.sauce = Sauce::none;
  expect_error(invalid, {"call: sauce is ", "expected mild, hot"},
               [&] { detail::check_choices("call", spec); });
}

// Every field's text is converted back, and invalid values are refused.
TEST(ConfigFields, texts) {
  hot::BackwardLinearSpec spec, back;
  spec.low_rank.rows = {0, 3, 5};
  spec.low_rank.layout = {14, 7, 2};
  spec.equalize_tokens = true;
  spec.storage = hot::Storage::int4;
  spec.hadamard_block = 64;
  const auto copy = [&] {
    detail::for_each_field(detail::FieldsOf<hot::BackwardLinearSpec>{}, [&](const auto& row) {
      const std::string text = detail::field_text(row, row.get(spec));
      detail::set_field_text(row, text, row.get(back));
      EXPECT_EQ(detail::field_text(row, row.get(back)), text) << row.name;
    });
  };
  copy();
  EXPECT_EQ(back.low_rank.rows, spec.low_rank.rows);
  EXPECT_EQ(back.low_rank.layout.grid_w, 7);
  EXPECT_EQ(back.storage, hot::Storage::int4);
  spec = {};
  copy();  // no rows and no grid
  EXPECT_TRUE(back.low_rank.rows.empty());
  EXPECT_EQ(back.low_rank.layout.grid_h, 0);
  const struct {
    const char *name, *text;
  } bad[] = {{"gx_bits", "four"},       {"gx_bits", "4 "},       {"gx_bits", ""},
             {"gx_bits", "4294967300"}, {"rows", "1,"},          {"rows", ",1"},
             {"token_grid", "3"},       {"token_grid", "1,2,3"}, {"equalize_tokens", "1"},
             {"storage", "int2"}};
  for (const auto& one : bad) {
    expect_error(invalid, {one.name, std::string("'") + one.text + "' is not"}, [&] {
      detail::with_field<hot::BackwardLinearSpec>(
          one.name, [&](const auto& row) { detail::set_field_text(row, one.text, row.get(back)); });
    });
  }
}

}  // namespace
