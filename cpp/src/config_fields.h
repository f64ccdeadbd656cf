// Table of all configuration fields: name, type, choices, meaning. It is the source of enumerators'
// names, checks, fingerprints, the C ABI, the bindings, JAX's attributes, Python's HotConfig and
// the table in the documentation. The structs define the defaults.
//
// To add a field, add a member with its default to BackwardLinearSpec, a member at the end of
// hot_spec, and a row here. Add a line to HotConfig (python/hotcore/config.py; a test compares it).
#pragma once

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "checks.h"
#include "fingerprint.h"
#include "hot/backward_linear.h"
#include "hot/error.h"
#include "hot/forward_linear.h"
#include "hot/hot_c.h"
#include "operands.h"

namespace hot::detail {

// An enumerator, its name, and its number in the C ABI.
template <class E>
struct Choice {
  constexpr Choice(E v, const char* n, int c) : value(v), name(n), number(c) {}
  constexpr Choice(E v, const char* n) : Choice(v, n, static_cast<int>(v)) {}
  E value;
  const char* name;
  int number;
};

// Choices of a field; empty for a field without choices.
template <class E>
using Choices = std::initializer_list<Choice<E>>;

inline constexpr Choices<Granularity> granularities = {{Granularity::tensor, "tensor"},
                                                       {Granularity::token, "token"},
                                                       {Granularity::channel, "channel"}};
inline constexpr Choices<Rounding> roundings = {{Rounding::stochastic, "stochastic"},
                                                {Rounding::nearest, "nearest"},
                                                {Rounding::pseudo_stochastic, "pseudo_stochastic"}};
inline constexpr Choices<Basis> bases = {{Basis::full, "full"},
                                         {Basis::lowpass, "lowpass"},
                                         {Basis::sequency, "sequency"},
                                         {Basis::sketch, "sketch"}};
inline constexpr Choices<Storage> storages = {{Storage::int8, "int8"}, {Storage::int4, "int4"}};

// Choices that a field accepts, if it does not accept all.
inline constexpr Choices<Granularity> gx_scales = {{Granularity::token, "token"},
                                                   {Granularity::tensor, "tensor"}};
// gw_scale has its own numbers in the C ABI.
inline constexpr Choices<Granularity> gw_scales = {{Granularity::channel, "channel", 1},
                                                   {Granularity::tensor, "tensor", 0},
                                                   {Granularity::token, "token", 2}};

template <class E>
const char* name_of(Choices<E> choices, E value) noexcept {
  for (const Choice<E>& one : choices) {
    if (one.value == value) return one.name;
  }
  return "unknown";
}

// List of names such as "'a', 'b', 'c'", with any quotes.
template <class E>
std::string names_of(Choices<E> choices, const char* quote = "'") {
  std::string text;
  for (const Choice<E>& one : choices) {
    text += joined_text(text.empty() ? "" : ", ", quote, one.name, quote);
  }
  return text;
}

template <class E>
E parse_choice(const char* field, std::string_view text, Choices<E> choices) {
  for (const Choice<E>& one : choices) {
    if (text == one.name) return one.value;
  }
  invalid(field, "'", text, "' is not one of ", names_of(choices));
}

// Buffers whose bytes depend on a field: a saved x, a quantised weight. Their fingerprints hash it.
enum Decides : unsigned { in_none = 0, in_saved = 1, in_weight = 2 };

// Type of a field's choices.
struct NoChoice {};
template <class T>
using ChoiceOf = std::conditional_t<std::is_enum_v<T>, T, NoChoice>;

// Row of the table. `get(spec)` is a reference to the member: an int, a bool, an enumerator, a list
// of ints, or a TokenLayout (for its grid). `c` is the member of the C struct, or nullptr for the
// list and the grid, which have several members.
template <class T, class Get, class CMember>
struct Field {
  using Value = T;
  const char* name;
  Get get;
  CMember c;
  unsigned decides;
  Choices<ChoiceOf<T>> choices;
  const char* values;  // description of the values, if there are no choices
  const char* doc;
};

template <class T, class Get, class CMember>
constexpr Field<T, Get, CMember> field(const char* name, Get get, CMember c, unsigned decides,
                                       Choices<ChoiceOf<T>> choices, const char* doc) {
  return {name, get, c, decides, choices, "", doc};
}
template <class T, class Get, class CMember>
constexpr Field<T, Get, CMember> field(const char* name, Get get, CMember c, unsigned decides,
                                       const char* values, const char* doc) {
  return {name, get, c, decides, {}, values, doc};
}

template <class Spec>
struct FieldsOf {};  // selects the struct whose fields for_each_field visits

#define HOT_GET(member) [](auto& spec) -> auto& { return spec.member; }

// Calls visit(field) for every row, in HotConfig's order.
template <class Visit>
void for_each_field(FieldsOf<BackwardLinearSpec>, Visit&& visit) {
  visit(field<int>("hadamard_block", HOT_GET(hadamard_block), &hot_spec::hadamard_block,
                   in_saved | in_weight, "power of two, 1 (none) to 256",
                   "block of the Hadamard transform along O"));
  visit(field<int>("gx_bits", HOT_GET(gx_bits), &hot_spec::gx_bits, in_weight, "4 or 8",
                   "bits of both operands of g_x = g_y w"));
  visit(field<Granularity>(
      "gx_scale", HOT_GET(gx_scale), &hot_spec::gx_scale, in_weight, gx_scales,
      "scales of g_y for g_x, one per token or one; w has one per input channel, or one with "
      "\"tensor\""));
  visit(field<Rounding>("gx_rounding", HOT_GET(gx_rounding), &hot_spec::gx_rounding, in_none,
                        roundings, "rounding of g_y for g_x; w is rounded to nearest"));
  visit(field<Basis>("basis", HOT_GET(low_rank.basis), &hot_spec::basis, in_saved, bases,
                     "rows kept in each block of tokens for g_w = g_y^T x"));
  visit(field<int>("rank", HOT_GET(low_rank.rank), &hot_spec::rank, in_saved, "1 to block",
                   "number of rows kept in each block; unused with basis \"full\" or with rows"));
  visit(field<int>("block", HOT_GET(low_rank.block), &hot_spec::block, in_saved,
                   "power of two, 2 to 64", "tokens in a block"));
  visit(field<std::vector<int>>(
      "rows", HOT_GET(low_rank.rows), nullptr, in_saved, "distinct, below block",
      "\"lowpass\" only: natural-order rows to keep, instead of the first rank rows"));
  visit(field<TokenLayout>("token_grid", HOT_GET(low_rank.layout), nullptr, in_saved,
                           "(height, width)",
                           "grid of a sample's patches, which is divided into tiles"));
  visit(field<int>("prefix_tokens", HOT_GET(low_rank.layout.prefix_tokens),
                   &hot_spec::prefix_tokens, in_saved, "0 or more",
                   "class tokens before each sample's grid; they are not transformed"));
  visit(field<Granularity>("gw_scale", HOT_GET(gw_scale), &hot_spec::gw_scale, in_saved, gw_scales,
                           "scales of g_y for g_w, one per channel, per token, or one; an INT8 x "
                           "has one per channel with \"channel\", "
                           "otherwise one. \"token\" (chosen by LQS) is slower"));
  visit(field<Rounding>("gw_rounding", HOT_GET(gw_rounding), &hot_spec::gw_rounding, in_none,
                        roundings, "rounding of g_y for g_w"));
  visit(field<Storage>("storage", HOT_GET(storage), &hot_spec::storage, in_saved, storages,
                       "format of the saved activation x; \"int4\" requires basis \"full\""));
  visit(field<bool>("equalize_tokens", HOT_GET(equalize_tokens), &hot_spec::equalize_tokens,
                    in_saved, "",
                    "divide each token of x by a power of two near its size before x is saved, "
                    "and multiply that token of g_y by it for g_w (exact)"));
}

// HotConfig's fields of the forward pass, which do not affect the backward pass.
enum class Forward : std::uint8_t { plain, int8 };
struct ForwardSettings {
  Forward forward = Forward::plain;
  ForwardLinearSpec spec{};
  bool in_eval = false;
};
inline constexpr Choices<Forward> forwards = {{Forward::plain, "plain"}, {Forward::int8, "int8"}};

template <class Visit>
void for_each_field(FieldsOf<ForwardSettings>, Visit&& visit) {
  visit(field<Forward>("forward", HOT_GET(forward), nullptr, in_none, forwards,
                       "product y = x w^T + b: the framework's, or hotcore.forward_linear "
                       "(straight-through gradients)"));
  visit(field<int>("forward_block", HOT_GET(spec.hadamard_block), nullptr, in_none,
                   "power of two, 1 (none) to 64, or 256",
                   "block of the int8 forward's Hadamard transform along I"));
  visit(field<bool>("forward_in_eval", HOT_GET(in_eval), nullptr, in_none, "",
                    "whether modules use forward in eval mode, too; otherwise eval is plain"));
}

#undef HOT_GET

// Throws if a field with choices has another value.
template <class Spec>
void check_choices(const char* call, const Spec& spec) {
  for_each_field(FieldsOf<Spec>{}, [&](const auto& f) {
    using T = typename std::decay_t<decltype(f)>::Value;
    if constexpr (std::is_enum_v<T>) {
      const T value = f.get(spec);
      for (const auto& one : f.choices) {
        if (one.value == value) return;
      }
      Choices<T> all = f.choices;  // only scales accept some of the enumerators
      if constexpr (std::is_same_v<T, Granularity>) all = granularities;
      invalid(call, f.name, " is ", name_of(all, value), "; expected ", names_of(f.choices, ""));
    }
  });
}

// Hashes the fields that affect a buffer. The caller has set irrelevant fields to fixed values.
template <class Spec>
void add_fields(Fingerprint& print, const Spec& spec, Decides part) {
  for_each_field(FieldsOf<Spec>{}, [&](const auto& f) {
    using T = typename std::decay_t<decltype(f)>::Value;
    if ((f.decides & part) == 0) return;
    const auto& value = f.get(spec);
    if constexpr (std::is_same_v<T, std::vector<int>>) {
      print.add(value.size());
      for (const int one : value) print.add(one);
    } else if constexpr (std::is_same_v<T, TokenLayout>) {
      print.add(value.grid_h).add(value.grid_w);
    } else {
      print.add(value);
    }
  });
}

// Text of a value: a name, a number, "true" or "false", numbers with commas, or "" for none.
template <class Row, class T>
std::string field_text(const Row& f, const T& value) {
  if constexpr (std::is_enum_v<T>) {
    return name_of(f.choices, value);
  } else if constexpr (std::is_same_v<T, bool>) {
    return value ? "true" : "false";
  } else if constexpr (std::is_same_v<T, int>) {
    return std::to_string(value);
  } else if constexpr (std::is_same_v<T, TokenLayout>) {
    if (value.grid_h == 0 && value.grid_w == 0) return "";
    return joined_text(value.grid_h, ",", value.grid_w);
  } else {
    std::string text;
    for (const int one : value) text += (text.empty() ? "" : ",") + std::to_string(one);
    return text;
  }
}

// Inverse of field_text. Throws for a text that does not fit the field's type.
template <class Row, class T>
void set_field_text(const Row& f, std::string_view text, T& value) {
  const auto refuse = [&](const char* expected) {
    invalid(f.name, "'", text, "' is not ", expected);
  };
  const auto number = [&](std::string_view digits) {
    int out = 0;
    const char* const end = digits.data() + digits.size();
    const auto [at, error] = std::from_chars(digits.data(), end, out);
    if (error != std::errc{} || at != end) refuse("a number of 32 bits, or several with commas");
    return out;
  };
  if constexpr (std::is_enum_v<T>) {
    value = parse_choice(f.name, text, f.choices);
  } else if constexpr (std::is_same_v<T, bool>) {
    if (text != "true" && text != "false") refuse("true or false");
    value = text == "true";
  } else if constexpr (std::is_same_v<T, int>) {
    value = number(text);
  } else {
    std::vector<int> numbers;
    for (std::string_view rest = text; !rest.empty();) {
      const std::size_t comma = rest.find(',');
      numbers.push_back(number(rest.substr(0, comma)));
      if (comma == rest.size() - 1) refuse("a list that ends with a number");
      rest = comma == std::string_view::npos ? "" : rest.substr(comma + 1);
    }
    if constexpr (std::is_same_v<T, TokenLayout>) {
      if (!numbers.empty() && numbers.size() != 2) refuse("height,width");
      value.grid_h = numbers.empty() ? 0 : numbers[0];
      value.grid_w = numbers.empty() ? 0 : numbers[1];
    } else {
      value = std::move(numbers);
    }
  }
}

// Name of a recipe, or null (recipes.cpp).
const char* recipe_name(int index) noexcept;

// Calls visit(row) for the field `name`. Throws if there is none.
template <class Spec, class Visit>
void with_field(std::string_view name, const Visit& visit) {
  bool exists = false;
  std::string known;
  for_each_field(FieldsOf<Spec>{}, [&](const auto& f) {
    known += joined_text(known.empty() ? "" : ", ", f.name);
    if (name != f.name) return;
    exists = true;
    visit(f);
  });
  if (!exists) {
    throw Error(ErrorCode::invalid_argument, joined_text("no field '", name, "'; fields: ", known));
  }
}

// Fills the C struct from a spec, except rows and row_count, which belong to the caller.
template <class Spec, class C>
void to_c(const Spec& spec, C& out) {
  for_each_field(FieldsOf<Spec>{}, [&](const auto& f) {
    using T = typename std::decay_t<decltype(f)>::Value;
    const auto& value = f.get(spec);
    if constexpr (std::is_enum_v<T>) {
      for (const auto& one : f.choices) {
        if (one.value == value) out.*f.c = one.number;
      }
    } else if constexpr (std::is_same_v<T, TokenLayout>) {
      out.grid_h = value.grid_h;
      out.grid_w = value.grid_w;
    } else if constexpr (!std::is_same_v<T, std::vector<int>>) {
      out.*f.c = static_cast<std::int32_t>(value);
    }
  });
}

// Inverse of to_c; `name` is that of the argument. Throws for an invalid number.
template <class Spec, class C>
Spec from_c(const char* call, const char* name, const C& from) {
  const auto refuse = [&](const char* member, auto value, const auto&... expected) {
    invalid(call, name, ".", member, " is ", value, "; expected ", expected...);
  };
  Spec out;
  for_each_field(FieldsOf<Spec>{}, [&](const auto& f) {
    using T = typename std::decay_t<decltype(f)>::Value;
    T& value = f.get(out);
    if constexpr (std::is_enum_v<T>) {
      const std::int32_t number = from.*f.c;
      std::string known;
      for (const auto& one : f.choices) {
        if (one.number == number) {
          value = one.value;
          return;
        }
        known += joined_text(known.empty() ? "" : ", ", one.number, " (", one.name, ")");
      }
      refuse(f.name, number, known);
    } else if constexpr (std::is_same_v<T, TokenLayout>) {
      value.grid_h = from.grid_h;
      value.grid_w = from.grid_w;
    } else if constexpr (std::is_same_v<T, std::vector<int>>) {
      if (from.row_count > static_cast<std::size_t>(max_low_rank_block)) {
        refuse("row_count", from.row_count, "at most ", max_low_rank_block);
      }
      if (from.row_count == 0) return;
      if (from.rows == nullptr) invalid(call, name, ".rows is null");
      value.assign(from.rows, from.rows + from.row_count);
    } else if constexpr (std::is_same_v<T, bool>) {
      const std::int32_t number = from.*f.c;
      if (number != 0 && number != 1) refuse(f.name, number, "0 or 1");
      value = number == 1;
    } else {
      value = from.*f.c;
    }
  });
  return out;
}

}  // namespace hot::detail
