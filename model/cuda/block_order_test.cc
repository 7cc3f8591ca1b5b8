#include "model/cuda/block_order.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace dim0::cuda {
namespace {

struct OrderCase {
  uint32_t tiles, pairs, pairs_per_group;
  std::string name() const {
    return std::to_string(tiles) + " tiles of " + std::to_string(pairs) + " pairs, " +
           std::to_string(pairs_per_group) + " a group";
  }
};

std::vector<OrderCase> Cases() {
  std::vector<OrderCase> cases;
  for (uint32_t tiles : {1, 2, 3, 16}) {
    for (uint32_t pairs : {1, 2, 31, 32, 33, 64, 96, 100}) {
      for (uint32_t pairs_per_group : {1, 2, 3, 32, 64, 100}) {
        if (pairs_per_group <= pairs) cases.push_back({tiles, pairs, pairs_per_group});
      }
    }
  }
  return cases;
}

std::vector<RankedTile> Order(const OrderCase& c) {
  std::vector<RankedTile> order;
  for (uint32_t block = 0; block < c.tiles * c.pairs; ++block) {
    order.push_back(TileOfBlock(block, c.tiles, c.pairs, c.pairs_per_group));
  }
  return order;
}

TEST(BlockOrderTest, EveryTileOfEveryPairIsTakenByOneBlock) {
  for (const OrderCase& c : Cases()) {
    std::set<std::pair<uint32_t, uint32_t>> seen;
    for (const RankedTile& tile : Order(c)) {
      ASSERT_LT(tile.pair, c.pairs) << c.name();
      ASSERT_LT(tile.rank, c.tiles) << c.name();
      EXPECT_TRUE(seen.emplace(tile.pair, tile.rank).second)
          << c.name() << ": twice tile " << tile.rank << " of pair " << tile.pair;
    }
  }
}

TEST(BlockOrderTest, GroupsComeOneAfterTheOtherAndTheSmallerOneFirst) {
  for (const OrderCase& c : Cases()) {
    const std::vector<RankedTile> order = Order(c);
    size_t begin = 0;
    while (begin < order.size()) {
      const uint32_t pairs_left = static_cast<uint32_t>(order.size() - begin) / c.tiles;
      const uint32_t rest = pairs_left % c.pairs_per_group;
      ASSERT_TRUE(rest == 0 || begin == 0) << c.name();
      const size_t end = begin + size_t{rest == 0 ? c.pairs_per_group : rest} * c.tiles;
      std::set<uint32_t> pairs;
      for (size_t i = begin; i < end; ++i) pairs.insert(order[i].pair);
      EXPECT_EQ(pairs.size(), (end - begin) / c.tiles) << c.name() << " from block " << begin;
      begin = end;
    }
  }
}

TEST(BlockOrderTest, WithinAGroupNoTileHasMoreWorkThanOneBeforeIt) {
  for (const OrderCase& c : Cases()) {
    const std::vector<RankedTile> order = Order(c);
    const auto group = [&](const RankedTile& tile) { return tile.pair / c.pairs_per_group; };
    for (size_t i = 1; i < order.size(); ++i) {
      if (group(order[i]) != group(order[i - 1])) continue;
      EXPECT_LE(order[i].rank, order[i - 1].rank) << c.name() << ", block " << i;
    }
  }
}

TEST(BlockOrderTest, AGroupsKeysAre8MebibytesOfBfloat16) {
  for (const auto& [seq_len, head_size, pairs] : std::vector<std::array<int64_t, 3>>{
           {1024, 64, 64}, {1024, 128, 32}, {2048, 64, 32}, {4096, 128, 8}, {1000, 80, 52}}) {
    EXPECT_EQ(PairsPerGroup(1 << 20, seq_len, head_size), pairs) << seq_len << " x " << head_size;
    EXPECT_LE(pairs * seq_len * head_size * 2, 8 << 20);
    EXPECT_GT((pairs + 1) * seq_len * head_size * 2, 8 << 20);
  }
}

TEST(BlockOrderTest, AGroupHasAtLeastOnePairAndAtMostAll) {
  EXPECT_EQ(PairsPerGroup(12, 1 << 20, 128), 1u);
  EXPECT_EQ(PairsPerGroup(12, 1024, 64), 12u);
  EXPECT_EQ(PairsPerGroup(1, 1, 1), 1u);
  EXPECT_EQ(PairsPerGroup(0, 0, 64), 1u);  // nothing to do, but no division by zero either
}

}  // namespace
}  // namespace dim0::cuda
