#include "runtime/parameter.h"

#include "absl/strings/str_cat.h"

namespace dim0 {

ParameterTable::ParameterTable(absl::Span<const UnitSpec> units) {
  for (const UnitSpec& unit : units) {
    first_.push_back(size());
    for (const ParameterSpec& spec : unit.parameters) {
      const int position = size() - first_.back();
      entries_.push_back({spec, num_units(), position});
      elements_ += spec.size();
    }
    unit_names_.push_back(unit.name);
  }
  first_.push_back(size());
}

int64_t ParameterTable::unit_elements(int unit) const {
  int64_t elements = 0;
  for (int id = first(unit); id < first(unit + 1); ++id) elements += entries_[id].spec.size();
  return elements;
}

uint64_t ParameterTable::Hash() const {
  uint64_t hash = HashBytes({});
  for (const Entry& entry : entries_) {
    const ParameterSpec& spec = entry.spec;
    hash = HashBytes(
        absl::StrCat(unit_names_[entry.unit], "/", spec.name, " ", spec.rows, "x", spec.cols, " ",
                     static_cast<int>(spec.role), " ", static_cast<int>(spec.init.kind), " ",
                     spec.init.stddev, " ", spec.fused, "x", spec.heads, "\n"),
        hash);
  }
  return hash;
}

uint64_t HashBytes(absl::Span<const char> bytes, uint64_t seed) {
  uint64_t hash = seed;
  for (const char c : bytes) {
    hash ^= static_cast<unsigned char>(c);
    hash *= 0x100000001b3u;
  }
  return hash;
}

}  // namespace dim0
