// A block's shared memory with a memory of its own: who wrote and who read each 16-byte chunk, and since which barrier.
//
// It starts as NaN. What cp.async copies is NaN until its thread has waited, and invisible to other threads until a
// barrier. A chunk may be read by another warp only after a block barrier that follows the write (by another lane of
// the same warp: a warp barrier), and overwritten only after one that follows the last read. Each breach is an error.
#pragma once
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace multiattn::emulation {

constexpr int CHUNK_BYTES = 16;
constexpr unsigned char POISON = 0xff;  // all ones is a NaN in fp16, bf16 and fp32

// The barriers that a thread has behind it.
struct Epoch {
  int thread, warp;
  std::int64_t block_barriers, warp_barriers;
};

class SharedMemory {
 public:
  explicit SharedMemory(std::size_t bytes) : bytes_((bytes + CHUNK_BYTES - 1) / CHUNK_BYTES * CHUNK_BYTES), size_(bytes) {
    data_ = static_cast<unsigned char*>(::operator new(bytes_ + CHUNK_BYTES, std::align_val_t(1024)));
    chunks_.resize(bytes_ / CHUNK_BYTES + 1);
    reset();
  }
  ~SharedMemory() { ::operator delete(data_, std::align_val_t(1024)); }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // A new block begins.
  void reset() {
    std::memset(data_, POISON, bytes_);
    std::fill(chunks_.begin(), chunks_.end(), ChunkState{});
  }

  unsigned char* at(std::uint32_t address) { return data_ + address; }

  // Empty when fine, else what is wrong with this access.
  std::string check_address(std::uint32_t address, int bytes) const {
    if (address % bytes != 0)
      return "address " + std::to_string(address) + " is not aligned to " + std::to_string(bytes) + " bytes";
    if (std::uint64_t(address) + bytes > size_)
      return "address " + std::to_string(address) + " is outside the " + std::to_string(size_) +
             " bytes of shared memory";
    return {};
  }

  std::string read(std::uint32_t address, const Epoch& now) {
    ChunkState& chunk = chunks_[address / CHUNK_BYTES];
    if (chunk.pending) return at_address("reads a cp.async that has not been waited for", address, chunk.writer);
    if (chunk.writer.thread != NOBODY && !ordered(chunk.writer, now))
      return at_address("reads, with no barrier between, what was written", address, chunk.writer);
    if (chunk.reader.thread != NOBODY && chunk.reader.block_barriers == now.block_barriers &&
        chunk.reader.warp != now.warp)
      chunk.reader.warp = chunk.reader.thread = MANY;
    else
      chunk.reader = now;
    return {};
  }

  // A cp.async of a whole chunk, or of a part of one, comes with `pending`; parts of one chunk may be under way together.
  enum class Pending { NONE, PART, WHOLE };

  std::string write(std::uint32_t address, const Epoch& now, Pending pending) {
    ChunkState& chunk = chunks_[address / CHUNK_BYTES];
    if (chunk.pending && !(chunk.in_parts && pending == Pending::PART))
      return at_address("overwrites a cp.async under way", address, chunk.writer);
    if (chunk.reader.thread != NOBODY && !ordered(chunk.reader, now))
      return at_address("overwrites, with no barrier between, what was read", address, chunk.reader);
    // Writers may share a chunk (4-byte stores): the last one stands for all, as a reader needs a barrier after each.
    chunk.writer = now;
    chunk.pending += pending != Pending::NONE;
    chunk.in_parts = pending == Pending::PART;
    return {};
  }

  // The thread that wrote it has waited: the data counts as written now.
  void land(std::uint32_t address, const Epoch& now) {
    --chunks_[address / CHUNK_BYTES].pending;
    chunks_[address / CHUNK_BYTES].writer = now;
  }

 private:
  static constexpr int NOBODY = -1, MANY = -2;
  struct ChunkState {
    Epoch writer{NOBODY, NOBODY, -1, -1}, reader{NOBODY, NOBODY, -1, -1};
    int pending = 0;  // copies under way
    bool in_parts = false;
  };

  // Whether what happened in `then` is known to be over in `now`.
  static bool ordered(const Epoch& then, const Epoch& now) {
    if (then.block_barriers < now.block_barriers || then.thread == now.thread) return true;
    return then.warp == now.warp && then.warp_barriers < now.warp_barriers;
  }

  static std::string at_address(const std::string& what, std::uint32_t address, const Epoch& who) {
    const std::string by = who.thread == MANY ? "several warps" : "thread " + std::to_string(who.thread);
    return what + " by " + by + " at shared address " + std::to_string(address);
  }

  std::size_t bytes_, size_;
  unsigned char* data_ = nullptr;
  std::vector<ChunkState> chunks_;
};

}  // namespace multiattn::emulation
