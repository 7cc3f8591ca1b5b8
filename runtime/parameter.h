// What a model's parameters are, globally: names, shapes, roles and the units they are gathered in.
// All that decides what is computed is taken from here, never from a shard.
#ifndef DIM0_RUNTIME_PARAMETER_H_
#define DIM0_RUNTIME_PARAMETER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"

namespace dim0 {

enum class ParameterRole : uint8_t {
  kMatrix,     // a hidden 2-D weight [out, in]; the matrix optimizers' business
  kEmbedding,  // a 2-D table indexed by token or position (a tied head included)
  kVector,     // a bias or a norm's gain: never decayed
};
inline constexpr int kNumParameterRoles = 3;

struct Init {
  enum class Kind : uint8_t { kZero, kOne, kNormal };
  Kind kind = Kind::kZero;
  float stddev = 0;  // of kNormal, mean 0
};

// Row-major [rows, cols]; a vector of n elements is [n, 1], so that its dimension 0 is sharded too.
struct ParameterSpec {
  std::string name;
  int64_t rows = 0;
  int64_t cols = 1;
  ParameterRole role = ParameterRole::kVector;
  Init init;
  // Of a weight that is several matrices one below the other: how many (3 for Q, K and V), and how
  // many heads each of them has. rows is divisible by their product.
  int fused = 1;
  int heads = 1;

  int64_t size() const { return rows * cols; }
};

// The parameters gathered and reduced together.
struct UnitSpec {
  std::string name;
  std::vector<ParameterSpec> parameters;
};

// Every parameter of the model, numbered from 0 in unit order. The same on every rank.
class ParameterTable {
 public:
  struct Entry {
    ParameterSpec spec;
    int unit = 0;      // index into units
    int position = 0;  // index within the unit
  };

  explicit ParameterTable(absl::Span<const UnitSpec> units);

  int size() const { return static_cast<int>(entries_.size()); }
  const Entry& operator[](int id) const { return entries_[id]; }
  int num_units() const { return static_cast<int>(unit_names_.size()); }
  const std::string& unit_name(int unit) const { return unit_names_[unit]; }
  // The unit's parameters have ids [first(unit), first(unit + 1)).
  int first(int unit) const { return first_[unit]; }
  // Elements of all parameters.
  int64_t elements() const { return elements_; }
  int64_t unit_elements(int unit) const;

  // Of names, shapes, roles, inits and units, for comparing plans across ranks.
  uint64_t Hash() const;

 private:
  std::vector<Entry> entries_;
  std::vector<std::string> unit_names_;
  std::vector<int> first_;
  int64_t elements_ = 0;
};

// FNV-1a, 64 bits. `seed` chains calls.
uint64_t HashBytes(absl::Span<const char> bytes, uint64_t seed = 0xcbf29ce484222325u);

}  // namespace dim0

#endif  // DIM0_RUNTIME_PARAMETER_H_
