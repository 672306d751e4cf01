// The shared memory of a block, or of a cluster's blocks, with a memory of its own: who wrote and who read each piece, and
// when.
//
// It starts as NaN. What cp.async copies is NaN until its thread has waited, and invisible to other threads until a
// barrier. A piece may be read by a thread that knows of the write (by a barrier, see clocks.h), and overwritten by one that
// knows of all reads. Each breach is an error.
#pragma once
#include <cstdint>
#include <cstring>
#include <new>
#include <span>
#include <string>
#include <vector>

#include "clocks.h"

namespace multiattn::emulation {

// ---- what the async proxy (TMA, wgmma) does with each line, a row of a swizzled tile: which loads, stores and wgmmas are
// under way, and what those that are over have left behind for others to wait for
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

// ---- what threads do with each piece
constexpr int CHUNK_BYTES = 16;
// From the start of a block's shared memory to that of the next one in the cluster: what a descriptor of wgmma can tell.
constexpr std::uint32_t WINDOW_BYTES = 1 << 18;
constexpr unsigned char POISON = 0xff;  // all ones is a NaN in fp16, bf16 and fp32

class SharedMemory {
 public:
  // `bytes` for each of the blocks.
  SharedMemory(std::size_t bytes, int blocks, const Clocks& clocks)
      : lines((blocks - 1) * WINDOW_BYTES + bytes, clocks),
        bytes_((blocks - 1) * WINDOW_BYTES + (bytes + CHUNK_BYTES - 1) / CHUNK_BYTES * CHUNK_BYTES),
        size_(bytes),
        pieces_(bytes_ / PIECE_BYTES),
        readers_(pieces_.size()) {
    data_ = static_cast<unsigned char*>(::operator new(bytes_ + CHUNK_BYTES, std::align_val_t(1024)));
    std::memset(data_, POISON, bytes_);
  }
  ~SharedMemory() { ::operator delete(data_, std::align_val_t(1024)); }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  unsigned char* at(std::uint32_t address) { return data_ + address; }
  AsyncLines lines;

  // Empty when fine, else what is wrong with this access to the shared memory of a block.
  std::string check_address(std::uint32_t address, int bytes, int alignment, int block) const {
    if (address % alignment != 0)
      return "address " + std::to_string(address) + " is not aligned to " + std::to_string(alignment) + " bytes";
    const std::uint32_t base = block * WINDOW_BYTES;
    if (address < base || std::uint64_t(address - base) + bytes > size_)
      return "address " + std::to_string(address) + " is outside the " + std::to_string(size_) +
             " bytes of shared memory";
    return {};
  }

  std::string read(std::uint32_t address, int bytes, const Moment& now) {
    if (const std::string problem = lines.read(address, now); !problem.empty()) return at_address(problem, address);
    for (Piece& piece : pieces(address, bytes)) {
      if (piece.pending) return by("reads a cp.async that has not been waited for", address, piece.writer.thread);
      if (!now.follows(piece.writer))
        return by("reads, with no barrier between, what was written", address, piece.writer.thread);
      note_reader(piece, now);
    }
    return {};
  }

  // `pending`: by a cp.async, which lands later.
  std::string write(std::uint32_t address, int bytes, const Moment& now, bool pending) {
    if (const std::string problem = lines.write(address, now); !problem.empty()) return at_address(problem, address);
    for (Piece& piece : pieces(address, bytes)) {
      if (piece.pending) return by("overwrites a cp.async under way", address, piece.writer.thread);
      if (const int reader = unknown_reader(piece, now); reader != Epoch::NOBODY)
        return by("overwrites, with no barrier between, what was read", address, reader);
      piece.writer = now;
      piece.pending = pending;
    }
    return {};
  }

  // The thread that wrote it has waited: the data counts as written now.
  void land(std::uint32_t address, int bytes, const Moment& now) {
    for (Piece& piece : pieces(address, bytes)) {
      piece.pending = false;
      piece.writer = now;
    }
  }

  // ---- for the async proxy, whole lines at a time
  // A TMA load will overwrite the line: what threads did with it is over, and forgotten, or an error.
  std::string take_line(std::uint32_t address, const Moment& now) {
    for (Piece& piece : pieces(address, LINE_BYTES))
      if (!piece.pending && !now.follows(piece.writer))
        return by("overwrites, with no barrier between, what was written", address, piece.writer.thread);
    std::string problem = write(address, LINE_BYTES, now, false);
    for (Piece& piece : pieces(address, LINE_BYTES)) piece = Piece{};
    return problem;
  }
  // Calls visit(writer) for every write of threads in the line.
  template <class Visit>
  void writers_of_line(std::uint32_t address, Visit visit) {
    for (const Piece& piece : pieces(address, LINE_BYTES))
      if (piece.writer.thread != Epoch::NOBODY) visit(piece.writer);
  }
  // The line was read for this thread.
  void note_line_read(std::uint32_t address, const Moment& now) {
    lines.of(address).generic = true;
    for (Piece& piece : pieces(address, LINE_BYTES)) note_reader(piece, now);
  }

 private:
  static constexpr int PIECE_BYTES = 4;  // what the smallest store writes

  struct Piece {
    Epoch writer, reader;
    bool pending = false;  // a cp.async will write it
  };

  std::span<Piece> pieces(std::uint32_t address, int bytes) {
    return {&pieces_[address / PIECE_BYTES], static_cast<std::size_t>(bytes / PIECE_BYTES)};
  }

  // When each thread has read a piece whose reader is MANY.
  std::vector<Time>& times_of_readers(const Piece& piece) { return readers_[&piece - pieces_.data()]; }

  // One reader, while each knows of the one before; else MANY.
  void note_reader(Piece& piece, const Moment& now) {
    if (piece.reader.thread == Epoch::MANY) {
      times_of_readers(piece)[now.thread] = now.time;
    } else if (now.follows(piece.reader)) {
      piece.reader = now;
    } else {
      std::vector<Time>& times = times_of_readers(piece);
      times.assign(now.threads, 0);
      times[piece.reader.thread] = piece.reader.time;
      times[now.thread] = now.time;
      piece.reader.thread = Epoch::MANY;
    }
  }

  // A thread of whose reads `now` does not know that they are over, or NOBODY.
  int unknown_reader(Piece& piece, const Moment& now) {
    if (piece.reader.thread != Epoch::MANY) return now.follows(piece.reader) ? Epoch::NOBODY : piece.reader.thread;
    const std::vector<Time>& times = times_of_readers(piece);
    for (int thread = 0; thread < now.threads; ++thread)
      if (now.clock[thread] < times[thread]) return thread;
    piece.reader = Epoch{};
    return Epoch::NOBODY;
  }

  static std::string at_address(const std::string& what, std::uint32_t address) {
    return what + " at shared address " + std::to_string(address);
  }
  static std::string by(const std::string& what, std::uint32_t address, int thread) {
    return at_address(what + " by thread " + std::to_string(thread), address);
  }

  std::size_t bytes_, size_;
  unsigned char* data_ = nullptr;
  std::vector<Piece> pieces_;
  std::vector<std::vector<Time>> readers_;  // of each piece
};

}  // namespace multiattn::emulation
