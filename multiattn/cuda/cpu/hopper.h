// The part of a Block that sm90 adds: mbarriers, TMA, named barriers, registers that warpgroups trade, and (warpgroup.h) wgmma.
//
// All that is asynchronous happens as late as the rules allow: a load lands when no thread can go on without it, the
// youngest first; a store reads shared memory when its thread waits for that; a wgmma runs when its warpgroup waits for it.
// Until then their targets are NaN, and what they still have to read may not be overwritten.
#pragma once
#include <cstdint>
#include <deque>
#include <initializer_list>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "block.h"
#include "warpgroup.h"

namespace multiattn::emulation {

// Its generation counts the phases that are complete.
struct Mbarrier : Condition {
  std::uint32_t address = 0;
  int actor = 0;                          // of the TMA loads that it counts
  int arrivals = 0, missing = 0;          // of a phase, and of this one
  std::int64_t bytes = 0;                 // that this phase still expects
  Epoch made{};
  bool fenced = false;                    // visible to the async proxy
  Clock arrived, released;                // of those who came; of the phases that are complete

  std::string state() const override {
    return "(" + std::to_string(address) + ", phase " + std::to_string(generation) + ": " +
           std::to_string(arrivals - missing) + " of " + std::to_string(arrivals) + " arrivals, " + std::to_string(bytes) +
           " bytes missing)";
  }
};

struct NamedBarrier : Condition {
  int threads = 0, arrived = 0;           // that make it up, 0 while nobody is there; that are there
  std::uint8_t lanes[32] = {};            // that are there, of each warp
  Clock joined, released;
  bool any = false, any_of_released = false;  // the predicates of those that are there, and of those before

  std::string state() const override {
    return "(" + std::to_string(arrived) + " of " + std::to_string(threads) + " threads are there)";
  }
};

// Where a box begins in a tensor, innermost first: column, row, head, and so on.
using BoxPlace = std::initializer_list<int>;

// A move by TMA, a line of shared memory at a time: a box of a tensor, or a run of bytes as they are.
struct Transfer {
  std::uint32_t tile;      // where it is in shared memory
  int bytes;               // there
  EncodedMap map{};        // of the box
  std::vector<int> place;  // of the box in the tensor
  unsigned char* run = nullptr;  // where it is no box
  bool adds = false;             // floats to those that are there
};

// A thread's async stores and fences.
struct AsyncThread {
  struct Store {
    Transfer what;
    std::int64_t group;
  };
  std::vector<Store> stores;
  std::int64_t groups = 0;                // of stores committed
  bool is_writing = false;                // nobody has waited until all are in global memory
  bool has_stored = false;
  bool is_behind = false;                 // it awaited what others stored without TMA, which TMA does not know of
  std::vector<Time> fences;               // when it made its writes visible to the async proxy
};

class Hopper {
 public:
  explicit Hopper(Block& block);

  // The current thread returns.
  void finish();
  // Lands the youngest load under way; false where there is none.
  bool land_youngest();

  // ---- the verbs, for the current thread
  void init_mbarrier(std::uint32_t address, int arrivals);
  void fence_mbarriers();
  // All threads see those that were fenced.
  void publish_mbarriers();
  void arrive(const char* verb, std::uint32_t address, int bytes);
  // At the same place in the shared memory of the cluster's block of that rank.
  void arrive_at(const char* verb, std::uint32_t address, int rank) { arrive(verb, in_block(verb, address, rank), 0); }
  void wait(std::uint32_t address, int parity);

  // To the blocks of ranks `first` to `last`.
  void load(const char* verb, int first, int last, std::uint32_t target, const void* map, std::uint32_t barrier,
            BoxPlace place);
  void load_run(const char* verb, std::uint32_t target, const void* source, int bytes, std::uint32_t barrier);
  void store(const char* verb, const void* map, std::uint32_t source, BoxPlace place);
  // Stores a run as it is, or adds its floats to those that are there.
  void store_run(const char* verb, float* target, std::uint32_t source, int bytes, bool adds);
  void commit_stores() { ++threads_[block_.current().index].groups; }
  // Until shared memory is read, or all is written.
  void wait_stores(int groups_left, bool written);
  // That all stores of the current thread's warp are written, of which those are to know who await the word.
  void check_written(const char* verb, const void* word);
  void note_awaited(const void* word) { threads_[block_.current().index].is_behind |= released_words.count(word) > 0; }
  void fence_global() { threads_[block_.current().index].is_behind = false; }
  // Words by which warps that store without TMA tell others in this launch.
  inline static std::set<const void*> released_words;
  void fence_writes();
  static const EncodedMap& check_map(const char* verb, const void* map);
  // An encoded map, of as many dimensions as the verb gives coordinates.
  static const EncodedMap& check_map(const char* verb, const void* map, BoxPlace place);

  // A grid that waits for earlier ones touches no global memory before. They end as late as they can: when no thread can go on.
  void touch_global() { touched_[rank()] = true; }
  void await_earlier_grids();
  bool end_earlier_grids();  // false where nobody waits

  bool named_barrier(const char* verb, int id, int threads, bool wait, bool predicate = false);
  void set_registers(const char* verb, int count, bool raise);
  Warpgroup& warpgroup(const char* verb);

  // ---- for reads of the async proxy
  // A line may be read by a thread that knows all that is added to `needs`; else it is an error.
  void need_line(const char* verb, std::uint32_t address, Needs& needs);
  // The current thread must know it all.
  void check_needs(const char* verb, const Needs& needs);

 private:
  struct Load {
    const char* verb;
    Transfer what;
    Mbarrier* barrier;
  };

  int rank() const { return block_.current().block; }
  // An address of the current thread's block in the one of another rank, which must be there.
  std::uint32_t in_block(const char* verb, std::uint32_t address, int rank);
  // To the current thread's block or that of another rank, `what.tile` being in this one.
  void begin_load(const char* verb, Transfer what, std::uint32_t barrier, int rank);
  void check_run(const char* verb, std::uint32_t tile, const void* run, int bytes);
  void take_lines(const char* verb, std::uint32_t target, int bytes);
  Mbarrier& mbarrier(const char* verb, std::uint32_t address);
  // Row `i` of a box that lands.
  void read_row(const Transfer& box, int i);
  void complete_if_due(const char* verb, Mbarrier& barrier);
  void begin_store(const char* verb, Transfer what);
  void write_out(const Transfer& what);
  // Row `i` of a box that is stored.
  void write_row(const Transfer& box, int i);

  Block& block_;
  Clocks& clocks_;
  AsyncLines& lines_;
  std::vector<std::unique_ptr<Mbarrier>> mbarriers_;
  std::vector<NamedBarrier> named_;  // of each block
  std::vector<AsyncThread> threads_;
  std::vector<std::unique_ptr<Warpgroup>> warpgroups_;
  std::deque<Load> loads_;
  Condition earlier_grids_;
  bool awaits_earlier_ = false;
  std::vector<bool> touched_;  // by each block: global memory
  std::vector<bool> touched_early_, waited_;  // as that was when earlier grids ended; the block waits for them, or did
  std::vector<RegisterPool> registers_;  // of each block
};

}  // namespace multiattn::emulation
