// Names of enumerators, read from the table of fields.
#include "config_fields.h"

namespace hot {

using detail::Choices;

const char* granularity_name(Granularity granularity) noexcept {
  return detail::name_of(Choices<Granularity>(detail::granularities), granularity);
}
const char* rounding_name(Rounding rounding) noexcept {
  return detail::name_of(Choices<Rounding>(detail::roundings), rounding);
}
const char* basis_name(Basis basis) noexcept {
  return detail::name_of(Choices<Basis>(detail::bases), basis);
}
const char* storage_name(Storage storage) noexcept {
  return detail::name_of(Choices<Storage>(detail::storages), storage);
}

}  // namespace hot
