// What the async proxy (TMA, wgmma) does with each 128 bytes of shared memory, a row of a swizzled tile: which loads, stores
// and wgmmas are under way, and what those that are over have left behind for others to wait for.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "clocks.h"

namespace multiattn::emulation {

constexpr int LINE_BYTES = 128;
constexpr int WARPS_OF_GROUP = 4, WARPGROUPS_MAX = 8;

// Where TMA puts, and wgmma looks for, what an address is of without the 128-byte swizzle: chunks of 16 bytes change places
// within a line.
inline std::uint32_t swizzled(std::uint32_t address) { return address ^ (address / LINE_BYTES & 7) << 4; }

struct Line {
  int load_actor = -1;  // of the latest TMA load that has landed
  Time loaded = 0;      // its phase
  bool loading = false;
  bool generic = false;                    // read or written by threads since
  std::uint16_t wgmmas = 0, stores = 0;    // under way that read it
  Time multiplied[WARPGROUPS_MAX] = {};    // when each warpgroup's latest wgmma that read it was over
};

class AsyncLines {
 public:
  AsyncLines(std::size_t bytes, const Clocks& clocks) : lines_(bytes / LINE_BYTES + 1), clocks_(clocks) {}

  void reset() { std::fill(lines_.begin(), lines_.end(), Line{}); }

  Line& of(std::uint32_t address) { return lines_[address / LINE_BYTES]; }

  // ---- empty when fine, else what is wrong with the access, in words that end before "at shared address"
  std::string read(std::uint32_t address, const Moment& now) {
    Line& line = of(address);
    line.generic = true;
    if (line.loading) return "reads a TMA load under way";
    return unknown_load(line, now) ? "reads, without a wait on its mbarrier, what a TMA load wrote" : "";
  }

  // By a thread, or by a TMA load that a thread issues.
  std::string write(std::uint32_t address, const Moment& now) {
    Line& line = of(address);
    line.generic = true;
    if (line.loading) return "overwrites a TMA load under way";
    if (line.wgmmas) return "overwrites what a wgmma under way reads";
    if (line.stores) return "overwrites what a TMA store under way reads";
    if (unknown_load(line, now)) return "overwrites, without a wait on its mbarrier, what a TMA load wrote";
    for (int group = 0; group < (now.threads + 127) / 128; ++group)
      if (line.multiplied[group] && unknown_wgmma(group, line.multiplied[group], now))
        return "overwrites, with no barrier between, what a wgmma of warpgroup " + std::to_string(group) + " read";
    return {};
  }

 private:
  static bool unknown_load(const Line& line, const Moment& now) {
    return line.load_actor >= 0 && now.clock[line.load_actor] < line.loaded;
  }
  // A wgmma is over in each warp by itself.
  bool unknown_wgmma(int group, Time time, const Moment& now) const {
    for (int warp = 0; warp < WARPS_OF_GROUP; ++warp)
      if (now.clock[clocks_.wgmma(group * WARPS_OF_GROUP + warp)] < time) return true;
    return false;
  }

  std::vector<Line> lines_;
  const Clocks& clocks_;
};

}  // namespace multiattn::emulation
