// Table of recipes, also read by Python's HotConfig.recipe and the C ABI. Names of enumerators,
// read from the table of fields.
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "config_fields.h"
#include "hot/backward_linear.h"

namespace hot {

using namespace detail;

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
    known += joined_text(known.empty() ? "'" : ", '", entry.name, "'");
  }
  invalid("recipe", "name is '", name, "'; expected one of ", known);
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

const char* granularity_name(Granularity value) noexcept { return name_of(granularities, value); }
const char* rounding_name(Rounding value) noexcept { return name_of(roundings, value); }
const char* basis_name(Basis value) noexcept { return name_of(bases, value); }
const char* storage_name(Storage value) noexcept { return name_of(storages, value); }

}  // namespace hot
