#include "runtime/parameter.h"

#include <gtest/gtest.h>

#include "runtime/sharding.h"

namespace dim0 {
namespace {

TEST(Sharding, LastRanksStoreFewerRowsOrNone) {
  // The example of the design: 6 rows over 4 ranks are 2, 2, 2, 0.
  EXPECT_EQ(ElementsPerRank(6, 1, 4), (std::vector<int64_t>{2, 2, 2, 0}));
  EXPECT_EQ(ElementsPerRank(7, 3, 4), (std::vector<int64_t>{6, 6, 6, 3}));
  EXPECT_EQ(ElementsPerRank(1, 5, 3), (std::vector<int64_t>{5, 0, 0}));
  EXPECT_EQ(ElementsPerRank(0, 5, 2), (std::vector<int64_t>{0, 0}));
}

TEST(Sharding, RangesOfAllRanksCoverEveryRowOnce) {
  for (int64_t rows = 0; rows < 40; ++rows) {
    for (int world_size = 1; world_size <= 9; ++world_size) {
      int64_t next = 0;
      for (int rank = 0; rank < world_size; ++rank) {
        const RowRange range = RowsOfRank(rows, world_size, rank);
        EXPECT_EQ(range.begin, next);
        EXPECT_GE(range.size(), 0);
        next = range.end;
      }
      EXPECT_EQ(next, rows);
    }
  }
}

TEST(Sharding, RowNumbersBeyond32BitsAreExact) {
  const int64_t rows = int64_t{5} << 32;
  EXPECT_EQ(RowsOfRank(rows, 3, 2).end, rows);
  EXPECT_EQ(RowsOfRank(rows, 3, 1).begin, (rows + 2) / 3);
}

std::vector<UnitSpec> TwoUnits() {
  return {{"root",
           {{"a", 4, 3, ParameterRole::kEmbedding, {}}, {"b", 5, 1, ParameterRole::kVector, {}}}},
          {"h.0", {{"c", 2, 2, ParameterRole::kMatrix, {}}}}};
}

TEST(ParameterTable, NumbersParametersInUnitOrder) {
  const ParameterTable table(TwoUnits());
  ASSERT_EQ(table.size(), 3);
  EXPECT_EQ(table[2].spec.name, "c");
  EXPECT_EQ(table[2].unit, 1);
  EXPECT_EQ(table[1].position, 1);
  EXPECT_EQ(table.first(1), 2);
  EXPECT_EQ(table.first(2), 3);
  EXPECT_EQ(table.elements(), 21);
  EXPECT_EQ(table.unit_elements(0), 17);
}

TEST(ParameterTable, HashChangesWithAnyShapeNameOrRole) {
  const uint64_t hash = ParameterTable(TwoUnits()).Hash();
  EXPECT_EQ(ParameterTable(TwoUnits()).Hash(), hash);
  auto units = TwoUnits();
  units[1].parameters[0].rows = 3;
  EXPECT_NE(ParameterTable(units).Hash(), hash);
  units = TwoUnits();
  units[0].parameters[1].name = "bb";
  EXPECT_NE(ParameterTable(units).Hash(), hash);
  units = TwoUnits();
  units[1].parameters[0].role = ParameterRole::kEmbedding;
  EXPECT_NE(ParameterTable(units).Hash(), hash);
}

TEST(HashBytes, IsFnv1a) {
  // Published test vectors of the 64-bit FNV-1a.
  EXPECT_EQ(HashBytes({}), 0xcbf29ce484222325u);
  EXPECT_EQ(HashBytes(std::string("a")), 0xaf63dc4c8601ec8cu);
  EXPECT_EQ(HashBytes(std::string("foobar")), 0x85944171f73967e8u);
}

}  // namespace
}  // namespace dim0
