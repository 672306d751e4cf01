// The shared memory of a block, or of a cluster's blocks, with a memory of its own: who wrote and who read each piece, and
// since which barrier.
//
// It starts as NaN. What cp.async copies is NaN until its thread has waited, and invisible to other threads until a
// barrier. A piece may be read by another warp only after a block barrier that follows the write (by another lane of
// the same warp: a warp barrier), and overwritten only after one that follows the last read. Each breach is an error.
// A piece is 16 bytes; 4 in a block with clocks, where whatever makes a thread know of another's access is a barrier.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>
#include <string>
#include <unordered_map>
#include <vector>

#include "async_lines.h"

namespace multiattn::emulation {

constexpr int CHUNK_BYTES = 16;
// From the start of a block's shared memory to that of the next one in the cluster: what a descriptor of wgmma can tell.
constexpr std::uint32_t WINDOW_BYTES = 1 << 18;
constexpr unsigned char POISON = 0xff;  // all ones is a NaN in fp16, bf16 and fp32

class SharedMemory {
 public:
  // `bytes` for each of the blocks.
  SharedMemory(std::size_t bytes, int blocks)
      : bytes_((blocks - 1) * WINDOW_BYTES + (bytes + CHUNK_BYTES - 1) / CHUNK_BYTES * CHUNK_BYTES), size_(bytes) {
    data_ = static_cast<unsigned char*>(::operator new(bytes_ + CHUNK_BYTES, std::align_val_t(1024)));
    pieces_.resize(bytes_ / piece_bytes_ + 1);
    reset();
  }
  ~SharedMemory() { ::operator delete(data_, std::align_val_t(1024)); }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  std::size_t bytes() const { return bytes_; }

  // A new block begins.
  void reset() {
    std::memset(data_, POISON, bytes_);
    std::fill(pieces_.begin(), pieces_.end(), Piece{});
    readers_.clear();
  }

  // From now on the block has clocks, and these are the lines of its async proxy.
  void share_with(AsyncLines& lines) {
    constexpr int FINER = 4;
    std::vector<Piece> finer(pieces_.size() * FINER);
    for (std::size_t i = 0; i < finer.size(); ++i) finer[i] = pieces_[i / FINER];
    pieces_ = std::move(finer);
    piece_bytes_ = CHUNK_BYTES / FINER;
    lines_ = &lines;
  }

  unsigned char* at(std::uint32_t address) { return data_ + address; }

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
    if (lines_)
      if (const std::string problem = lines_->read(address, now); !problem.empty()) return at_address(problem, address);
    for (Piece& piece : pieces(address, bytes)) {
      if (piece.pending) return by("reads a cp.async that has not been waited for", address, piece.writer);
      if (piece.writer.any() && !now.follows(piece.writer))
        return by("reads, with no barrier between, what was written", address, piece.writer);
      note_reader(piece, now);
    }
    return {};
  }

  // A cp.async of a whole chunk, or of a part of one, comes with `pending`; parts of one chunk may be under way together.
  enum class Pending { NONE, PART, WHOLE };

  std::string write(std::uint32_t address, int bytes, const Moment& now, Pending pending) {
    if (lines_)
      if (const std::string problem = lines_->write(address, now); !problem.empty()) return at_address(problem, address);
    for (Piece& piece : pieces(address, bytes)) {
      if (piece.pending && !(piece.in_parts && pending == Pending::PART))
        return by("overwrites a cp.async under way", address, piece.writer);
      if (const Epoch* reader = unknown_reader(piece, now))
        return by("overwrites, with no barrier between, what was read", address, *reader);
      // Writers may share a piece (4-byte stores): the last one stands for all, as a reader needs a barrier after each.
      piece.writer = now;
      piece.pending += pending != Pending::NONE;
      piece.in_parts = pending == Pending::PART;
    }
    return {};
  }

  // The thread that wrote it has waited: the data counts as written now.
  void land(std::uint32_t address, int bytes, const Moment& now) {
    for (Piece& piece : pieces(address, bytes)) {
      --piece.pending;
      piece.writer = now;
    }
  }

  // ---- for the async proxy, whole lines at a time
  // A TMA load will overwrite the line: what threads did with it is over, and forgotten, or an error.
  std::string take_line(std::uint32_t address, const Moment& now) {
    for (Piece& piece : pieces(address, LINE_BYTES))
      if (!piece.pending && piece.writer.any() && !now.follows(piece.writer))
        return by("overwrites, with no barrier between, what was written", address, piece.writer);
    std::string problem = write(address, LINE_BYTES, now, Pending::NONE);
    for (Piece& piece : pieces(address, LINE_BYTES)) piece = Piece{};
    lines_->of(address).generic = false;
    return problem;
  }
  // Calls visit(writer) for every write of threads in the line.
  template <class Visit>
  void writers_of_line(std::uint32_t address, Visit visit) {
    for (const Piece& piece : pieces(address, LINE_BYTES))
      if (piece.writer.any()) visit(piece.writer);
  }
  // The line was read for this thread.
  void note_line_read(std::uint32_t address, const Moment& now) {
    lines_->of(address).generic = true;
    for (Piece& piece : pieces(address, LINE_BYTES)) note_reader(piece, now);
  }

 private:
  static constexpr Epoch NEVER{Epoch::NOBODY, Epoch::NOBODY, Epoch::NOBODY, -1, -1, 0};

  struct Piece {
    Epoch writer = NEVER, reader = NEVER;
    int pending = 0;  // copies under way
    bool in_parts = false;
  };
  struct Pieces {
    Piece *first, *last;
    Piece* begin() const { return first; }
    Piece* end() const { return last; }
  };

  Pieces pieces(std::uint32_t address, int bytes) {
    Piece* first = &pieces_[address / piece_bytes_];
    return {first, std::min(first + std::max(bytes / piece_bytes_, 1), pieces_.data() + pieces_.size())};
  }

  void note_reader(Piece& piece, const Moment& now) {
    Epoch& reader = piece.reader;
    if (now.clock) {
      note_reader_of_clocks(piece, now);
    } else if (reader.any() && reader.block_barriers == now.block_barriers && reader.warp != now.warp) {
      reader.warp = reader.thread = Epoch::MANY;
    } else {
      reader = now;
    }
  }

  // One reader, while each knows of the one before; else each thread's latest.
  void note_reader_of_clocks(Piece& piece, const Moment& now) {
    const auto key = static_cast<std::uint32_t>(&piece - pieces_.data());
    if (piece.reader.thread == Epoch::MANY) {
      readers_[key][now.thread] = now;
    } else if (!piece.reader.any() || now.follows(piece.reader)) {
      piece.reader = now;
    } else {
      std::vector<Epoch>& all = readers_[key];
      all.assign(now.threads, NEVER);
      all[piece.reader.thread] = piece.reader;
      all[now.thread] = now;
      piece.reader.warp = piece.reader.thread = Epoch::MANY;
    }
  }

  // A reader of whom `now` does not know that it is done, or null.
  const Epoch* unknown_reader(Piece& piece, const Moment& now) {
    if (!piece.reader.any()) return nullptr;
    if (!now.clock || piece.reader.thread != Epoch::MANY) return now.follows(piece.reader) ? nullptr : &piece.reader;
    for (const Epoch& reader : readers_[static_cast<std::uint32_t>(&piece - pieces_.data())])
      if (reader.any() && !now.follows(reader)) return &reader;
    piece.reader = NEVER;
    return nullptr;
  }

  static std::string at_address(const std::string& what, std::uint32_t address) {
    return what + " at shared address " + std::to_string(address);
  }
  static std::string by(const std::string& what, std::uint32_t address, const Epoch& who) {
    return at_address(what + " by " + who.who(), address);
  }

  std::size_t bytes_, size_;
  int piece_bytes_ = CHUNK_BYTES;
  unsigned char* data_ = nullptr;
  std::vector<Piece> pieces_;
  std::unordered_map<std::uint32_t, std::vector<Epoch>> readers_;  // by piece; where its reader is MANY
  AsyncLines* lines_ = nullptr;
};

}  // namespace multiattn::emulation
