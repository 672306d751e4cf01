#include "hopper.h"

#include <algorithm>
#include <cstring>

#include "formats.h"

namespace multiattn::emulation {

namespace {

constexpr int NAMED_BARRIERS = 16, REGISTERS = 65536, REGISTERS_OF_THREAD = 256, REGISTER_UNIT = 8;
constexpr int BOX_COLUMNS = LINE_BYTES / 2, BOX_MAX = 256, TILE_ALIGNMENT = 1024;

// The time of the loads that are part of a phase.
Time time_of_phase(std::int64_t phase) { return Clocks::BEFORE + 1 + static_cast<Time>(phase); }

// The tensor's part of one row of a box.
struct BoxRow {
  int first = 0, count = 0;         // columns of the box that the tensor has
  unsigned char* memory = nullptr;  // of the first of them

  // Row `i` of the box.
  BoxRow(const Transfer& box, int i) {
    const EncodedMap& map = box.map;
    auto address = reinterpret_cast<std::uint64_t>(map.base);  // which may wrap around on its way
    for (int axis = 1; axis < map.rank; ++axis) {
      const std::int64_t at = box.place[axis] + (axis == 1 ? static_cast<std::int64_t>(i) : 0);
      if (at < 0 || at >= map.sizes[axis]) return;
      address += static_cast<std::uint64_t>(at) * static_cast<std::uint64_t>(map.strides[axis - 1]);
    }
    const int column = box.place[0];
    first = std::clamp(-column, 0, BOX_COLUMNS);
    count = std::clamp(map.sizes[0] - column, first, BOX_COLUMNS) - first;
    if (count) memory = reinterpret_cast<unsigned char*>(address) + (column + first) * 2ll;
  }
};

// A line of them.
void add_floats(unsigned char* target, const unsigned char* source) {
  for (int at = 0; at < LINE_BYTES; at += 4) {
    float sum, added;
    std::memcpy(&sum, target + at, 4);
    std::memcpy(&added, source + at, 4);
    sum += added;
    std::memcpy(target + at, &sum, 4);
  }
}

}  // namespace

// ---- the block
Hopper::Hopper(Block& block)
    : block_(block),
      clocks_(block.clocks),
      lines_(block.smem.lines),
      named_(NAMED_BARRIERS * block.blocks()),
      threads_(block.threads()),
      touched_(block.blocks()),
      touched_early_(block.blocks()),
      waited_(block.blocks()),
      registers_(block.blocks()) {
  const int registers = REGISTERS / block.threads_of_block() / REGISTER_UNIT * REGISTER_UNIT;
  for (int i = 0; i < block.threads() / WARPGROUP_SIZE; ++i)
    warpgroups_.push_back(std::make_unique<Warpgroup>(block, *this, i, std::min(registers, REGISTERS_OF_THREAD)));
}

void Hopper::finish() {
  const Thread& me = block_.current();
  if (!threads_[me.index].stores.empty()) block_.fail("returns without a wait for its TMA stores to read shared memory");
  if (const std::size_t group = me.index / WARPGROUP_SIZE; group < warpgroups_.size()) warpgroups_[group]->finish();
  if (!block_.ended(me.block)) return;
  for (const Load& load : loads_)
    if (static_cast<int>(load.what.tile / WINDOW_BYTES) == me.block)
      block_.fail("returns, the last thread of the block, with TMA loads under way");
}

Warpgroup& Hopper::warpgroup(const char* verb) {
  const std::size_t group = block_.current().index / WARPGROUP_SIZE;
  if (group >= warpgroups_.size()) block_.fail(verb, "the thread is in no whole warpgroup of 128");
  return *warpgroups_[group];
}

// ---- mbarriers
void Hopper::init_mbarrier(std::uint32_t address, int arrivals) {
  constexpr const char* VERB = "mbarrier_init";
  block_.require(VERB, block_.smem.check_address(address, 8, 8, rank()));
  if (arrivals < 1 || arrivals >= 1 << 20) block_.fail(VERB, "a count of " + std::to_string(arrivals));
  for (const auto& barrier : mbarriers_)
    if (barrier->address == address) block_.fail(VERB, "the mbarrier at " + std::to_string(address) + " exists already");
  if (mbarriers_.size() == MBARRIERS_MAX) block_.fail(VERB, "the emulation has no more than " + std::to_string(MBARRIERS_MAX) + " mbarriers");
  auto barrier = std::make_unique<Mbarrier>();
  barrier->address = address;
  barrier->actor = clocks_.tma(static_cast<int>(mbarriers_.size()));
  barrier->arrivals = barrier->missing = arrivals;
  barrier->made = block_.now();
  barrier->arrived = barrier->released = clocks_.nothing();
  mbarriers_.push_back(std::move(barrier));
}

void Hopper::fence_mbarriers() {
  for (auto& barrier : mbarriers_)
    if (barrier->made.thread == block_.current().index) barrier->fenced = true;
}

void Hopper::publish_mbarriers() {
  for (auto& barrier : mbarriers_)
    if (barrier->fenced) barrier->made.time = Clocks::BEFORE;
}

Mbarrier& Hopper::mbarrier(const char* verb, std::uint32_t address) {
  for (auto& barrier : mbarriers_) {
    if (barrier->address != address) continue;
    if (!block_.now().follows(barrier->made))
      block_.fail(verb, "no barrier follows the mbarrier_init of " + std::to_string(address));
    return *barrier;
  }
  block_.fail(verb, "there is no mbarrier at " + std::to_string(address) + ": mbarrier_init is missing");
}

void Hopper::arrive(const char* verb, std::uint32_t address, int bytes) {
  Mbarrier& barrier = mbarrier(verb, address);
  if (!barrier.missing)
    block_.fail(verb, "more arrivals than the " + std::to_string(barrier.arrivals) + " of a phase at the mbarrier" +
                   barrier.state());
  barrier.bytes += bytes;
  --barrier.missing;
  clocks_.release(block_.current().index, barrier.arrived);
  complete_if_due(verb, barrier);
}

std::uint32_t Hopper::in_block(const char* verb, std::uint32_t address, int other) {
  if (other < 0 || other >= block_.blocks())
    block_.fail(verb, "a rank of " + std::to_string(other) + " in a cluster of " + std::to_string(block_.blocks()));
  if (block_.ended(other)) block_.fail(verb, "block " + std::to_string(other) + " of the cluster has ended");
  return address + (other - rank()) * WINDOW_BYTES;
}

void Hopper::complete_if_due(const char* verb, Mbarrier& barrier) {
  if (barrier.missing || barrier.bytes > 0) return;
  if (barrier.bytes < 0) block_.fail(verb, "more bytes than expected came to the mbarrier" + barrier.state());
  ++barrier.generation;
  barrier.missing = barrier.arrivals;
  barrier.arrived[barrier.actor] = time_of_phase(barrier.generation - 1);
  barrier.released = barrier.arrived;
}

void Hopper::wait(std::uint32_t address, int parity) {
  constexpr const char* VERB = "mbarrier_wait";
  Mbarrier& barrier = mbarrier(VERB, address);
  if (parity != 0 && parity != 1) block_.fail(VERB, "a parity of " + std::to_string(parity));
  if (barrier.generation % 2 == parity) {  // that phase is not complete
    const std::int64_t phase = barrier.generation;
    block_.wait_for(VERB, barrier);
    if (barrier.generation > phase + 1)
      block_.fail(VERB, "the phase after the one waited for has gone by, too: mbarrier" + barrier.state());
  }
  clocks_.acquire(block_.current().index, barrier.released);
}

// ---- TMA
const EncodedMap& Hopper::check_map(const char* verb, const void* address) {
  const auto& map = *static_cast<const EncodedMap*>(address);
  const auto broken = [&](const std::string& what) { running_block->fail(verb, "the tensor map " + what); };
  if (reinterpret_cast<std::uintptr_t>(address) % 64) broken("is not aligned to 64 bytes");
  if (reinterpret_cast<std::uintptr_t>(map.base) % 16) broken("has an address that is not aligned to 16 bytes");
  for (const std::int64_t stride : map.strides)
    if (stride % 16) broken("has a stride of " + std::to_string(stride) + " bytes, no multiple of 16");
  bool is_of_one_head = map.box[0] == BOX_COLUMNS;
  for (int axis = 2; axis < map.rank; ++axis) is_of_one_head &= map.box[axis] == 1;
  if (!is_of_one_head) broken("has a box that is not of 64 columns of one head");
  if (map.box[1] < 1 || map.box[1] > BOX_MAX) broken("has a box of " + std::to_string(map.box[1]) + " rows, beyond 256");
  return map;
}

const EncodedMap& Hopper::check_map(const char* verb, const void* address, BoxPlace place) {
  const EncodedMap& map = check_map(verb, address);
  if (map.rank != static_cast<int>(place.size()))
    running_block->fail(verb, "the tensor map has " + std::to_string(map.rank) + " dimensions");
  return map;
}

void Hopper::load(const char* verb, int first, int last, std::uint32_t target, const void* map_address,
                  std::uint32_t barrier_address, BoxPlace place) {
  const EncodedMap& map = check_map(verb, map_address, place);
  const int bytes = map.box[1] * LINE_BYTES;
  block_.require(verb, block_.smem.check_address(target, bytes, TILE_ALIGNMENT, rank()));
  for (int rank = first; rank <= last; ++rank) begin_load(verb, {target, bytes, map, place}, barrier_address, rank);
  ++block_.counters.tma_loads;
}

void Hopper::load_run(const char* verb, std::uint32_t target, const void* source, int bytes,
                      std::uint32_t barrier_address) {
  check_run(verb, target, source, bytes);
  auto* run = static_cast<unsigned char*>(const_cast<void*>(source));  // which is read only
  begin_load(verb, {target, bytes, {}, {}, run}, barrier_address, rank());
}

void Hopper::begin_load(const char* verb, Transfer what, std::uint32_t barrier_address, int rank) {
  Mbarrier& barrier = mbarrier(verb, in_block(verb, barrier_address, rank));
  if (!barrier.fenced)
    block_.fail(verb, "no fence_mbarrier_init follows the mbarrier_init of " + std::to_string(barrier_address));
  what.tile = in_block(verb, what.tile, rank);
  take_lines(verb, what.tile, what.bytes);
  loads_.push_back({verb, std::move(what), &barrier});
  touch_global();
}

// The GPU asks for multiples of 16 alone; but it is lines that are watched.
void Hopper::check_run(const char* verb, std::uint32_t tile, const void* run, int bytes) {
  if (bytes <= 0 || bytes % LINE_BYTES)
    block_.fail(verb, std::to_string(bytes) + " bytes: a multiple of 128, which the emulation asks for");
  block_.require(verb, block_.smem.check_address(tile, bytes, LINE_BYTES, rank()));
  if (reinterpret_cast<std::uintptr_t>(run) % CHUNK_BYTES)
    block_.fail(verb, "the global address is not aligned to 16 bytes");
}

// A load will write them, for the current thread.
void Hopper::take_lines(const char* verb, std::uint32_t target, int bytes) {
  for (const auto& other : mbarriers_)
    if (other->address >= target && other->address < target + bytes)
      block_.fail(verb, "overwrites the mbarrier at " + std::to_string(other->address));
  const Moment now = block_.now();
  for (std::uint32_t line = target; line < target + bytes; line += LINE_BYTES) {
    block_.require(verb, block_.smem.take_line(line, now));
    lines_.of(line) = Line{};
    lines_.of(line).loading = true;
  }
  std::memset(block_.smem.at(target), POISON, bytes);
}

bool Hopper::land_youngest() {
  if (loads_.empty()) return false;
  const auto [verb, what, barrier] = loads_.back();
  loads_.pop_back();
  for (int i = 0; i < what.bytes / LINE_BYTES; ++i) {
    const std::uint32_t address = what.tile + i * LINE_BYTES;
    if (what.run)
      std::memcpy(block_.smem.at(address), what.run + i * LINE_BYTES, LINE_BYTES);
    else
      read_row(what, i);
    Line& line = lines_.of(address);
    line.loading = false;
    line.load_actor = barrier->actor;
    line.loaded = time_of_phase(barrier->generation);
  }
  barrier->bytes -= what.bytes;
  complete_if_due(verb, *barrier);
  return true;
}

void Hopper::read_row(const Transfer& box, int i) {
  const std::uint32_t address = box.tile + i * LINE_BYTES;
  const BoxRow part(box, i);
  unsigned char row[LINE_BYTES] = {};
  if (part.count) std::memcpy(row + 2 * part.first, part.memory, 2 * part.count);
  for (int at = 0; at < LINE_BYTES; at += CHUNK_BYTES)
    std::memcpy(block_.smem.at(swizzled(address + at)), row + at, CHUNK_BYTES);
}

void Hopper::store(const char* verb, const void* map_address, std::uint32_t source, BoxPlace place) {
  const EncodedMap& map = check_map(verb, map_address, place);
  const int bytes = map.box[1] * LINE_BYTES;
  block_.require(verb, block_.smem.check_address(source, bytes, TILE_ALIGNMENT, rank()));
  if (std::min(place) < 0)  // a load may, as multiattn/ptx_sm90.cuh says
    block_.fail(verb, "begins before the tensor, which is an illegal instruction");
  begin_store(verb, {source, bytes, map, place});
}

void Hopper::store_run(const char* verb, float* target, std::uint32_t source, int bytes, bool adds) {
  if (threads_[block_.current().index].is_behind) block_.fail(verb, "no fence_async_global follows its await_global");
  check_run(verb, source, target, bytes);
  begin_store(verb, {source, bytes, {}, {}, reinterpret_cast<unsigned char*>(target), adds});
  touch_global();
}

void Hopper::begin_store(const char* verb, Transfer what) {
  Needs needs;
  for (int at = 0; at < what.bytes; at += LINE_BYTES) {
    need_line(verb, what.tile + at, needs);
    ++lines_.of(what.tile + at).stores;
  }
  check_needs(verb, needs);
  AsyncThread& me = threads_[block_.current().index];
  me.stores.push_back({std::move(what), me.groups});
  me.is_writing = me.has_stored = true;
}

void Hopper::wait_stores(int groups_left, bool written) {
  AsyncThread& me = threads_[block_.current().index];
  if (written && groups_left == 0) me.is_writing = false;
  const auto due = [&](const AsyncThread::Store& store) { return store.group < me.groups - groups_left; };
  for (const AsyncThread::Store& store : me.stores)
    if (due(store)) write_out(store.what);
  me.stores.erase(std::remove_if(me.stores.begin(), me.stores.end(), due), me.stores.end());
}

void Hopper::check_written(const char* verb, const void* word) {
  const AsyncThread* const warp = &threads_[block_.current().index / WARP_SIZE * WARP_SIZE];
  for (int lane = 0; lane < WARP_SIZE; ++lane)
    if (warp[lane].is_writing) block_.fail(verb, "a store of lane " + std::to_string(lane) + " may not be written");
  if (std::none_of(warp, warp + WARP_SIZE, [](const AsyncThread& it) { return it.has_stored; })) released_words.insert(word);
}

void Hopper::write_out(const Transfer& what) {
  const Moment now = block_.now();
  for (int i = 0; i < what.bytes / LINE_BYTES; ++i) {
    const std::uint32_t address = what.tile + i * LINE_BYTES;
    if (what.run && what.adds)
      add_floats(what.run + i * LINE_BYTES, block_.smem.at(address));
    else if (what.run)
      std::memcpy(what.run + i * LINE_BYTES, block_.smem.at(address), LINE_BYTES);
    else
      write_row(what, i);
    --lines_.of(address).stores;
    block_.smem.note_line_read(address, now);
  }
}

void Hopper::write_row(const Transfer& box, int i) {
  unsigned char row[LINE_BYTES];
  for (int at = 0; at < LINE_BYTES; at += CHUNK_BYTES)
    std::memcpy(row + at, block_.smem.at(swizzled(box.tile + i * LINE_BYTES + at)), CHUNK_BYTES);
  const BoxRow part(box, i);
  if (part.count) std::memcpy(part.memory, row + 2 * part.first, 2 * part.count);
}

// ---- what the async proxy reads
void Hopper::fence_writes() {
  const int thread = block_.current().index;
  threads_[thread].fences.push_back(clocks_.now(thread));
  clocks_.tick(thread);
}

void Hopper::need_line(const char* verb, std::uint32_t address, Needs& needs) {
  const Line& line = lines_.of(address);
  const auto at = [&] { return " at shared address " + std::to_string(address); };
  if (line.loading) block_.fail(verb, "reads a TMA load under way" + at());
  const auto need = [&](int actor, Time time, const auto& reason) {
    for (Need& known : needs)
      if (known.actor == actor && known.time >= time) return;
    needs.push_back({actor, time, reason() + at()});
  };
  if (line.load_actor >= 0)
    need(line.load_actor, line.loaded,
         [] { return std::string("reads, without a wait on its mbarrier, what a TMA load wrote"); });
  if (!line.generic) return;
  block_.smem.writers_of_line(address, [&](const Epoch& writer) {
    const auto by = [&] { return "what thread " + std::to_string(writer.thread) + " wrote"; };
    const std::vector<Time>& fences = threads_[writer.thread].fences;
    const auto fence = std::lower_bound(fences.begin(), fences.end(), writer.time);
    if (fence == fences.end())
      block_.fail(verb, "reads, with no fence_async_shared after it, " + by() + at());
    need(writer.thread, *fence + 1,
         [&] { return "reads, with no barrier after its fence_async_shared, " + by(); });
  });
}

void Hopper::check_needs(const char* verb, const Needs& needs) {
  const Time* known = clocks_.of(block_.current().index);
  for (const Need& need : needs)
    if (known[need.actor] < need.time) block_.fail(verb, need.reason);
}

void Hopper::await_earlier_grids() {
  if (touched_[rank()]) block_.fail("await_earlier_grids", "global memory was touched before it");
  if (!waited_[rank()]) ++block_.counters.grid_waits;
  waited_[rank()] = true;
  awaits_earlier_ = true;
  block_.wait_for("await_earlier_grids", earlier_grids_);
  if (touched_early_[rank()]) block_.fail("await_earlier_grids", "global memory was touched by a thread that did not wait");
}

bool Hopper::end_earlier_grids() {
  if (!awaits_earlier_) return false;
  awaits_earlier_ = false;
  touched_early_ = touched_;  // of several that wait, the first to go on may touch it before the last does
  ++earlier_grids_.generation;
  return true;
}

// ---- named barriers
bool Hopper::named_barrier(const char* verb, int id, int threads, bool wait, bool predicate) {
  const Thread& me = block_.current();
  if (wait) block_.check_warp(verb);
  if (id < 1 || id >= NAMED_BARRIERS) block_.fail(verb, "a barrier " + std::to_string(id) + ", there are 1 to 15");
  if (threads < WARP_SIZE || threads % WARP_SIZE || threads > block_.threads_of_block())
    block_.fail(verb, std::to_string(threads) + " threads: a multiple of 32, as many as the block has at most");
  NamedBarrier& barrier = named_[me.block * NAMED_BARRIERS + id];
  const std::string name = "barrier " + std::to_string(id);
  if (!barrier.arrived) barrier.threads = threads;
  if (barrier.joined.empty()) barrier.joined = clocks_.nothing();
  if (barrier.threads != threads)
    block_.fail(verb, name + " is of " + std::to_string(threads) + " threads here, of " + std::to_string(barrier.threads) +
                   " elsewhere");
  if (++barrier.lanes[me.warp] > WARP_SIZE)
    block_.fail(verb, name + " is not complete, and the warp comes to it once more");
  clocks_.release(me.index, barrier.joined);
  barrier.any |= predicate;
  if (++barrier.arrived == threads) {
    for (std::uint8_t& lanes : barrier.lanes) {
      if (lanes % WARP_SIZE) block_.fail(verb, name + " got " + std::to_string(lanes) + " lanes of a warp");
      lanes = 0;
    }
    barrier.released = barrier.joined;
    barrier.arrived = 0;
    barrier.any_of_released = barrier.any;
    barrier.any = false;
    ++barrier.generation;
  } else if (wait) {
    block_.wait_for(verb, barrier);
  }
  if (wait) clocks_.acquire(me.index, barrier.released);
  return barrier.any_of_released;
}

void Hopper::set_registers(const char* verb, int count, bool raise) {
  if (count < 24 || count > REGISTERS_OF_THREAD || count % REGISTER_UNIT)
    block_.fail(verb, std::to_string(count) + " registers: a multiple of 8 from 24 to 256");
  warpgroup(verb).set_registers(verb, count, raise, registers_[rank()]);
}

}  // namespace multiattn::emulation
