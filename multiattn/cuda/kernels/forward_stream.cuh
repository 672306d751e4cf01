// The pieces of K and V that a block walks over, loaded with cp.async ahead of use, each into a slot of a ring.
#pragma once
#include "forward_traits.cuh"
#include "multiattn/params.h"
#include "multiattn/place.cuh"

namespace multiattn {

// The queries of a head that a block owns: tiles that see the most keys first. In a packed batch `batch` is the number of
// the sequence, and `sequence` says where it lies.
template <class T>
struct Work {
  int batch, head, head_kv, first_query;
  SequenceOf<T> sequence;

  static DEVICE Work of(const typename T::Params& params) {
    const Place it = Place::of(block_index(), params.tiles, params.heads, params.heads_per_section);
    if constexpr (IS_PACKED<typename T::Blocked>) {
      const ListedTile tile = find_sequence(tile_lists(params.lists).query_list, it.place);
      return {tile.number, it.head, it.head / params.group, tile.first_row, tile.sequence};
    } else {
      const int head = it.head % params.heads_q;
      return {it.head / params.heads_q, head, head / params.group, (params.tiles - 1 - it.place) * T::TILE_M, {}};
    }
  }
};

// Where the sequences of one head live: the only place that turns (batch, head) into addresses. Each address is made
// where it is needed, as one that is kept across the loop costs registers there.
template <class T>
struct HeadTensors {
  const ForwardParams& params;
  Work<T> work;

  DEVICE const uint16* q() const {
    return static_cast<const uint16*>(params.q) + offset_q(params.strides_q) + work.first_query * params.strides_q.seq;
  }
  DEVICE const uint16* k() const { return static_cast<const uint16*>(params.k) + offset_kv(params.strides_k); }
  DEVICE const uint16* v() const { return static_cast<const uint16*>(params.v) + offset_kv(params.strides_v); }
  DEVICE uint16* out() const { return static_cast<uint16*>(params.out) + offset_q(params.strides_out); }
  DEVICE float* lse() const { return rows(params.lse); }
  // The head's part of an array like lse.
  DEVICE float* rows(float* all) const {
    if constexpr (PACKED) return all + static_cast<int64>(work.head) * params.seq_q + work.sequence.offset_q;
    else return all + (static_cast<int64>(work.batch) * params.heads_q + work.head) * params.seq_q;
  }
  DEVICE float sink() const { return load_global_4(params.sinks + work.head); }  // only where heads have one

 private:
  static constexpr bool PACKED = IS_PACKED<typename T::Blocked>;

  DEVICE int64 offset_q(const Strides& strides) const {
    if constexpr (PACKED) return work.head * strides.head + work.sequence.offset_q * strides.seq;
    else return work.batch * strides.batch + work.head * strides.head;
  }
  DEVICE int64 offset_kv(const Strides& strides) const {
    if constexpr (PACKED) return work.head_kv * strides.head + work.sequence.offset_kv * strides.seq;
    else return work.batch * strides.batch + work.head_kv * strides.head;
  }
};

// The walk over the tiles of keys, at its beginning.
template <class T>
DEVICE KeysOf<T> keys_of(const typename T::Params& params, const Mask<T::BAND>& mask, const Work<T>& work) {
  if constexpr (HAS_LISTS<typename T::Blocked>) {
    return listed_keys<T>(params, work.sequence, work.batch, work.batch, work.head, work.first_query);
  } else {
    return mask.template keys<T::TILE_N>(work.first_query, T::TILE_M);
  }
}

// Pieces come in one order: those of K of a block (each with its part of Q, where Q streams), then those of V. A piece is
// loaded AHEAD pieces before its use, when nobody uses what its slot held any more. `block` is a step of the walk over the
// tiles of keys: where a block mask lists them, another number than that of the tile.
template <class T>
class Stream {
 public:
  using Walk = KeysOf<T>;

  DEVICE Stream(const ForwardParams& params, const HeadTensors<T>& tensors, SharedAddress ring, const Walk& walk)
      : params_(params), tensors_(tensors), ring_(ring), walk_(walk) {}

  DEVICE void start() {
#pragma unroll
    for (int piece = 0; piece < T::AHEAD; ++piece) load(walk_.begin, piece);
  }

  DEVICE const Walk& walk() const { return walk_; }

  // The piece of K of the block is there for all threads when this returns; where K and V are joint, V is, too.
  DEVICE void await_k(int block, int piece) { await(block, piece); }

  // The piece of V is there for all threads, and K of the block is no longer needed.
  DEVICE void await_v(int block, int piece) {
    if constexpr (!T::JOINT) await(block, T::K_PIECES + piece);
  }

  DEVICE SharedAddress k(int block, int piece) const { return ring_ + slot_of_k(block, piece) * T::SLOT; }
  DEVICE SharedAddress q(int block, int piece) const { return k(block, piece) + T::PieceK::BYTES; }
  DEVICE SharedAddress v(int block, int piece) const {
    if constexpr (T::SHARED_RING) return ring_ + slot_of(block * T::PIECES + T::K_PIECES + piece, T::STAGES) * T::SLOT;
    return ring_ + T::STAGES * T::SLOT + slot_of(block * T::V_PIECES + piece, T::V_SLOTS) * T::PieceV::BYTES;
  }

 private:
  DEVICE void await(int block, int piece) {
    if constexpr (T::AHEAD == 0) {
      sync_block();  // nobody still reads what the load overwrites
      load(block, piece);
      cp_async_wait<0>();
      sync_block();  // everybody's part of the piece has landed
    } else {
      cp_async_wait<T::AHEAD - 1>();
      sync_block();  // everybody's part has landed; and nobody still reads what the next load overwrites
      load(block, piece + T::AHEAD);
    }
  }

  // Counted from a block's first piece; may be one of a later block.
  DEVICE void load(int block, int piece) {
    block += piece / T::PIECES;
    piece %= T::PIECES;
    if (block < walk_.end) {
      const bool is_k = piece < T::K_PIECES;
      int tile = block;
      if constexpr (HAS_LISTS<typename T::Blocked>) tile = walk_.to_load();
      if (is_k) load_k(block, piece, tile);
      if (T::JOINT || !is_k) load_v(block, T::JOINT ? 0 : piece - T::K_PIECES, tile);
      if constexpr (HAS_LISTS<typename T::Blocked>)
        if (piece + 1 == T::PIECES) walk_.look_ahead(block + 1);
    }
    cp_async_commit();
  }

  // For a tile that sequences cut.
  DEVICE int first_key(int tile) const { return first_key_in<typename T::Blocked, T::TILE_N>(tensors_.work.sequence, tile); }

  DEVICE void load_k(int block, int piece, int tile) {
    int first = tile * T::TILE_N;
    if constexpr (IS_CUT<typename T::Blocked>) first = first_key(tile);
    const int column = piece * T::K_WIDTH;
    load_piece<typename T::PieceK>(k(block, piece), tensors().k() + first * params_.strides_k.seq, params_.strides_k.seq,
                                   end_key_in<typename T::Blocked, T::TILE_N>(params_, tensors_.work.sequence, tile) - first, column);
    if constexpr (T::STREAMED)
      load_piece<typename T::PieceQ>(q(block, piece), tensors_.q(), params_.strides_q.seq,
                                     count_queries(params_, tensors_.work.sequence) - tensors_.work.first_query, column);
  }

  template <class Piece>
  DEVICE void load_piece(SharedAddress target, const uint16* rows, int64 stride, int valid_rows, int column) {
    const int valid_chunks = T::SLICED_K ? (T::HEAD_DIM - column) / CHUNK_ELEMENTS : Piece::VALID_CHUNKS;
    load_tile<Piece, T::THREADS, T::ALIGNED>(target, rows + column, stride, valid_rows, thread_index(), valid_chunks);
  }

  DEVICE void load_v(int block, int piece, int tile) {
    int first = tile * T::TILE_N + piece * T::V_ROWS;
    if constexpr (IS_CUT<typename T::Blocked>) first = first_key(tile) + piece * T::V_ROWS;
    load_tile<typename T::PieceV, T::THREADS, T::ALIGNED>(v(block, piece), tensors().v() + first * params_.strides_v.seq,
                                                          params_.strides_v.seq,
                                                          end_key_in<typename T::Blocked, T::TILE_N>(params_, tensors_.work.sequence, tile) - first);
  }

  // Where K and V are. Where registers are scarce, their addresses are made for each load.
  DEVICE HeadTensors<T> tensors() const {
    HeadTensors<T> it = tensors_;
    if constexpr (T::CROWDED) {
      it.work.head_kv = recomputed(it.work.head_kv);
      if constexpr (IS_PACKED<typename T::Blocked>)
        it.work.sequence.offset_kv = recomputed(it.work.sequence.offset_kv);
      else
        it.work.batch = recomputed(it.work.batch);
    }
    return it;
  }

  DEVICE int slot_of_k(int block, int piece) const {
    return slot_of(T::SHARED_RING ? block * T::PIECES + piece : block * T::K_PIECES + piece, T::STAGES);
  }
  static DEVICE int slot_of(int piece, int slots) { return static_cast<uint32>(piece) % static_cast<uint32>(slots); }

  const ForwardParams& params_;
  const HeadTensors<T>& tensors_;
  SharedAddress ring_;
  Walk walk_;
};

}  // namespace multiattn
