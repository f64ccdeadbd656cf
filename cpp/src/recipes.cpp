// Table of recipes, also read by Python's HotConfig.recipe and the C ABI. Names of enumerators,
// read from the table of fields.
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "config_fields.h"
#include "hot/backward_linear.h"

namespace hot {
namespace {

struct Recipe {
  const char* name;
  void (*change)(BackwardLinearSpec&);  // changes default fields
};

constexpr Recipe recipes[] = {
    {"default", [](BackwardLinearSpec&) {}},
    {"fast",
     [](BackwardLinearSpec& spec) {
       spec.low_rank.basis = Basis::sketch;
       spec.low_rank.rank = 8;
       spec.storage = Storage::int8;
     }},
    {"paper",
     [](BackwardLinearSpec& spec) {
       spec.gx_bits = 4;
       spec.gx_scale = Granularity::tensor;
       spec.low_rank.basis = Basis::lowpass;
       spec.low_rank.rank = 8;
       spec.gw_scale = Granularity::tensor;
       spec.storage = Storage::int8;
     }},
    {"accurate", [](BackwardLinearSpec& spec) { spec.storage = Storage::int8; }},
};

}  // namespace

BackwardLinearSpec recipe(std::string_view name) {
  std::string known;
  for (const Recipe& entry : recipes) {
    if (name == entry.name) {
      BackwardLinearSpec spec;
      entry.change(spec);
      return spec;
    }
    known += detail::joined_text(known.empty() ? "'" : ", '", entry.name, "'");
  }
  detail::invalid("recipe", "name is '", name, "'; expected one of ", known);
}

const char* detail::recipe_name(int index) noexcept {
  const bool known = index >= 0 && index < static_cast<int>(std::size(recipes));
  return known ? recipes[index].name : nullptr;
}

std::vector<std::string> recipe_names() {
  std::vector<std::string> names;
  for (const Recipe& entry : recipes) names.emplace_back(entry.name);
  return names;
}

const char* granularity_name(Granularity granularity) noexcept {
  return detail::name_of(detail::Choices<Granularity>(detail::granularities), granularity);
}
const char* rounding_name(Rounding rounding) noexcept {
  return detail::name_of(detail::Choices<Rounding>(detail::roundings), rounding);
}
const char* basis_name(Basis basis) noexcept {
  return detail::name_of(detail::Choices<Basis>(detail::bases), basis);
}
const char* storage_name(Storage storage) noexcept {
  return detail::name_of(detail::Choices<Storage>(detail::storages), storage);
}

}  // namespace hot
