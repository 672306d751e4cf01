// The parameter structs of the kernels: one of each forward, one that all kernels of a backward launch take.
// multiattn/cuda/params.py reads them from here; every translation unit asserts that both have one size.
#pragma once
#include "multiattn/types.h"

namespace multiattn {

// Strides in elements; the stride of D is 1. Any of them may be 0 (broadcast).
struct Strides {
  int64 batch, head, seq;
};

// The lists of a block mask in one direction, contiguous. Those of a row of blocks have the place `batch entry *
// stride_batch + query head * stride_head + row`: partial blocks are counts[place] many, the first of which is
// indices[place * columns], and so are full ones.
struct BlockLists {
  const int32* counts;        // never null
  const int32* indices;       // never null
  const int32* full_counts;   // null: no list names a full block
  const int32* full_indices;  // like full_counts
  int32 stride_batch, stride_head, columns;
};

// Behind the other parameters of every kernel with a block mask: the blocks of keys of a block of queries, and the blocks
// of queries of one of keys.
struct MaskLists {
  BlockLists keys, queries;
};

// In their place where a kernel has asked the expression's mask of partial blocks, once for all heads that share a list.
struct BitLists {
  BlockLists keys, queries;
  uint32* mask_bits;  // workspace, as `BitsOf` says
  int32 bit_columns;  // partial blocks of a list that have bits, from its first on
};

// Behind the plain parameters of every kernel of a packed batch: the tiles of queries, and those of keys, of all its
// sequences. sequence.cuh reads them; null where no kernel of the launch owns such tiles.
struct TileLists {
  const int32* query_list;
  const int32* key_list;
  int32 sequences;
};

// In the place of both where a block mask is over the axis that the sequences are packed along.
struct SequenceLists {
  BlockLists keys, queries;
  TileLists tiles;
};

// For the kernel that makes these lists. A list has room for the most tiles that so many rows in so many sequences can have.
struct ListParams {
  const int32* cu_seqlens_q;   // [sequences + 1], never null: where sequences begin in q, and where the last one ends
  const int32* cu_seqlens_kv;  // the same of k and v
  int32* query_list;           // [tiles_q, 8]; null: not wanted
  int32* key_list;             // [tiles_kv, 8]; null: not wanted
  int32* next_tile;            // the counter of the kernel that comes next, to be emptied; null: it has none
  int32 sequences;
  int32 rows_q, rows_kv;    // of q and of k, those around the sequences included
  int32 longest_q, longest_kv;  // the most rows of a sequence
  int32 tile_q, tile_kv;    // rows of a tile
  int32 tiles_q, tiles_kv;  // entries
};

struct ForwardParams {
  const void* q;  // [batch, heads_q, seq_q, D] 16-bit, never null
  const void* k;  // [batch, heads_q / group, seq_kv, D] 16-bit, never null
  const void* v;  // like k
  void* out;      // [batch, heads_q, seq_q, D] 16-bit, never null, rows 16-byte aligned
  float* lse;     // [batch, heads_q, seq_q], contiguous, natural log, never null
  Strides strides_q, strides_k, strides_v, strides_out;
  int32 heads_q;
  int32 group;  // query heads that share one key/value head
  int32 seq_q, seq_kv;
  int32 tiles;              // of TILE_M queries, per head
  int32 heads;              // batch * heads_q
  int32 heads_per_section;  // heads whose tiles run side by side, so that their K and V stay in L2
  int32 scale_sign;         // of the softmax scale: 1, -1 or 0; it is folded into Q
  float scale_log2;         // |scale| * log2(e), always positive; without meaning when scale_sign is 0
  int32* next_tile;    // with Scheduler::DYNAMIC a counter, zero at launch and again afterwards; else null
  int32 left, right;   // keys before and after its own that a query sees, with Band::TWO_SIDED
  const float* sinks;  // [heads_q], contiguous, natural log; null: none
};

// For kernels whose blocks own rows of one head of keys, the queries of all heads that share it, and a part of the keys; and for those
// that merge what they leave. Row r of a sequence is query r / group of the head r % group among those.
struct SplitParams {
  const void* q;    // [batch, heads_q, seq_q, D] 16-bit, never null
  const void* k;    // [entries, heads_kv, rows, D] 16-bit, never null: entries are sequences, or pages
  const void* v;    // like k
  void* out;        // like q, rows 16-byte aligned, never null
  float* lse;       // [batch, heads_q, seq_q], contiguous, natural log, never null
  const float* sinks;  // [heads_q], contiguous, natural log; null: none
  const int32* seqlens_kv;    // [sequences]: the keys of each; null: seq_kv
  const int32* page_table;    // [sequences, table_stride]; null: an entry for each sequence
  const int32* cu_seqlens_q;  // [sequences + 1]: where queries of each begin, batch is 1; null: seq_q of each batch entry
  float* partial_out;  // workspace: [splits, batch, heads_q, seq_q, D], each part divided by its sum; null with one split
  float* partial_lse;  // workspace: [splits, batch, heads_q, seq_q], in the log2 domain
  Strides strides_q, strides_k, strides_v, strides_out;
  int32 heads_q, heads_kv;
  int32 group;  // query heads that share one key/value head
  int32 seq_q, seq_kv;
  int32 sequences;
  int32 tiles;   // of TILE_M rows, of a sequence and head of keys
  int32 splits;  // parts of the keys
  int32 merged_rows;  // rows of a block that merges many parts: a power of two
  int32 page;    // keys of a page; 0: no pages
  uint32 page_multiplier;  // keys divide by those of a page as `PlaceOfKey` has it
  int32 page_shift;
  int32 table_stride;
  int32 scale_sign;    // as the forward's, like all that follow
  float scale_log2;
  int32 left, right;
};

// Behind its parameters where a cache has 8-bit numbers: their scales. Those of heads are [sequences, heads_kv], those of tokens
// [entries, heads_kv, rows] as k is; what is broadcast has a stride of 0.
struct CacheScales {
  const float* k_scale;  // never null
  const float* v_scale;  // never null
  Strides strides_k_scale, strides_v_scale;
};

// For the kernel for sm90 among those whose blocks own rows of one head of keys.
struct SplitWgmmaParams {
  TensorMap map_k, map_v;  // 4-D: D, rows, heads_kv, entries, innermost first; boxes are 64 columns of BOX_ROWS keys. Empty
                           // where keys are gathered.
  SplitParams forward;
};

struct WgmmaParams {
  // 4-D: D, S, H, B, innermost first; boxes are 64 columns of TILE_M rows of q, TILE_N / CLUSTER of k and v, 64 of
  // out. Of a packed batch they are 5-D and ragged (ragged.cuh), with 64 rows of q.
  TensorMap map_q, map_k, map_v, map_out;
  ForwardParams forward;
};

// Behind the plain parameters of a forward that also writes the largest score of each row.
struct RowMax {
  float* row_max;      // like lse, in natural units, never null
  float* partial_max;  // workspace: like partial_lse; null where keys are in one part
};

struct BackwardParams {
  const void* q;      // [batch, heads_q, seq_q, D] 16-bit, never null
  const void* k;      // [batch, heads_q / group, seq_kv, D] 16-bit, never null
  const void* v;      // like k
  const void* out;    // like q, rows 16-byte aligned, never null
  const void* dout;   // like out, with its strides
  const float* lse;   // [batch, heads_q, seq_q], contiguous, natural log, never null
  const float* dlse;  // like lse; null: zero
  void* dq;           // like out, with its strides
  void* dk;           // like k, rows 16-byte aligned, never null
  void* dv;           // like dk
  float* delta;       // like lse: rowsum(dout * out) - dlse; workspace, or for the gradient of sinks the caller's
  float* dq_sum;      // workspace, `DqSum` says what is where; null where dq has a kernel of its own
  Strides strides_q, strides_k, strides_v, strides_out, strides_dk, strides_dv;
  int32 heads_q;
  int32 group;  // query heads that share one key/value head
  int32 seq_q, seq_kv;
  int32 heads_q_all, heads_kv_all;           // times batch
  int32 tiles_rows;                          // per head, in the kernels of rows
  int32 tiles_q, tiles_kv;                   // per head, in the kernel of k and v: of queries and of keys
  int32 tiles_q_own;                         // per head, in the kernel of q
  int32 sections_q, sections_kv;             // heads whose tiles run side by side, so that what they share stays in L2
  float score_factor;  // from q k^T to scores in the log2 domain, with the sign of the scale; 0 for a zero scale
  float grad_factor;   // of dq and dk: the scale
  int32 left, right;   // as the forward's
};

struct WgmmaBackwardParams {
  // As WgmmaParams has them; boxes are 64 columns of TILE_M rows of q and dout, TILE_N of k and v.
  TensorMap map_q, map_k, map_v, map_dout;
  BackwardParams backward;
  float* statistics;  // workspace: for each tile of TILE_M queries of a head their lse in the log2 domain, then their delta
  int32* next_tile;   // workspace: the counter of tiles of keys, and where dq has a kernel of its own that of its tiles
};

// Behind them where tiles of keys are divided among blocks: each into equal shares of its walk's steps, or the last of a schedule,
// which are all as long, into ranges of their steps.
struct Division {
  float* key_sums;  // workspace: what `KeySums` says, of each divided tile
  int64 key_sums_bytes;
  int32 shares;       // of a tile; 1: those before `ranges_from` are whole
  int32 ranges_from;  // the first tile of ranges; with shares the number of these
  int32 ranges;       // 0 with shares
  int32 range_steps;  // of each, but the last may have fewer
};

// Behind them where dS is stored, of some heads at a time.
struct StoredHeads {
  void* ds;                // workspace: dS^T of a tile of keys and one of queries, as `ds_image` says
  int32 first_head, heads; // of keys, through the batch: those of the launch
};

// Behind them where P and dS are stored, of some heads and some of their queries at a time.
struct StoredProducts {
  void* weights;           // workspace: P, 64 queries and 64 keys at a time, as `Images` says
  void* ds;                // like weights
  float* key_sums;         // workspace: dk and dv of the turns before, in fp32; null: there is one turn
  int32 first_head, heads;  // of keys, through the batch: those of the launch
  int32 first_tile, tiles;  // of 128 queries of each query head
  int32 turn, turns;        // over the queries of these heads
};

}  // namespace multiattn
