// Merges the parts of each row that the blocks of split_keys.cuh leave: out = sum of w_s out_s with w_s = exp(lse_s - lse).
#pragma once
#include "grids.cuh"
#include "multiattn/softmax.cuh"
#include "split_keys_traits.cuh"

namespace multiattn {

struct MergeConfig {
  int head_dim_v, threads;
  int columns = 0;      // of a block of `merge_splits`: a lane's each, when it writes
  int parts_max;        // of a row
  bool sinks;           // each head has one more key, without a value
  bool packed_queries;  // rows may be before the first sequence
  bool overlaps;        // it begins while the grid before it ends, and lets the next one do so
  bool row_max = false;  // parts also leave the largest score of each row
};

template <class Element_, MergeConfig C>
struct AnyMergeTraits {
  using Element = Element_;
  static constexpr int HEAD_DIM_V = C.head_dim_v, THREADS = C.threads, PARTS_MAX = C.parts_max;
  static constexpr bool HAS_SINKS = C.sinks, HAS_PACKED_QUERIES = C.packed_queries, OVERLAPS = C.overlaps;
  static constexpr bool HAS_MAX = C.row_max;
  using Params = typename WithMax<SplitParams, HAS_MAX>::Type;
  static constexpr int AHEAD = 4;  // parts that a thread reads at a time
};

template <class Element, MergeConfig C>
struct MergeTraits : AnyMergeTraits<Element, C> {
  static constexpr int COLUMNS = C.columns;
  static constexpr int COLUMN_BLOCKS = (C.head_dim_v + COLUMNS - 1) / COLUMNS;
  static constexpr int LANES = COLUMNS / CHUNK_ELEMENTS;  // threads that read a part of a row, a chunk of columns each
  static constexpr int SLOTS = C.threads / LANES;         // parts that are read at a time
  // A weight for each part of each of the block's rows, and sums: a thread's own of its columns.
  static constexpr int SUMS_AT = C.parts_max * 4, SUMS_PITCH = COLUMNS + 4;  // fp32
  static constexpr int SMEM_BYTES = SUMS_AT + SLOTS * SUMS_PITCH * 4;
  static_assert(COLUMNS == WARP && SLOTS <= C.parts_max, "a lane for each column, room for all weights");
};

// The place of a row of lse. It is computed without memory, and so before the wait for other grids.
struct PlaceOfRow {
  int query, head, batch;

  static DEVICE PlaceOfRow of(const SplitParams& params, int row) {
    Digits place{static_cast<uint32>(row)};
    const int query = place.take(params.seq_q), head = place.take(params.heads_q);
    return {query, head, static_cast<int>(place.rest)};
  }
  DEVICE uint16* out(const SplitParams& params) const {
    const Strides& strides = params.strides_out;
    return static_cast<uint16*>(params.out) + batch * strides.batch + head * strides.head + query * strides.seq;
  }
  // Rows before the first sequence and behind the last are nobody's.
  template <class T>
  DEVICE bool is_owned(const SplitParams& params) const {
    if constexpr (T::HAS_PACKED_QUERIES)
      if (query < load_global_4(params.cu_seqlens_q)) return false;
    return !params.cu_seqlens_q || query < load_global_4(params.cu_seqlens_q + params.sequences);
  }
};

// With a row's maximum (log2) and sum over its parts: what their weights are multiplied by. Writes the row's lse.
template <class T>
DEVICE float finish_row(const SplitParams& params, int row, const PlaceOfRow& place, float max, float sum, bool writes_lse) {
  float decay = 1.0f;
  if constexpr (T::HAS_SINKS) decay = add_sink(max, sum, load_global_4(params.sinks + place.head));
  const bool empty = sum == 0.0f;
  if (writes_lse && place.is_owned<T>(params))
    store_global_4(params.lse + row, empty ? -infinity() : (max + log2_exact(sum)) * LN_2);
  return empty ? 0.0f : decay / sum;
}

// The largest score of a row, of its parts from one on, every `step`-th (log2).
DEVICE float top_of_parts(const SplitParams& params, const RowMax& parts, int row, int first, int step) {
  float top = -infinity();
  for (int split = first; split < params.splits; split += step)
    top = fmaxf(top, load_global_4(parts.partial_max + split * rows_of(params) + row));
  return top;
}

// A warp finds the weight of each part of a row, the row's lse on the way. A part without keys weighs nothing.
template <class T>
DEVICE void weigh(const typename T::Params& params, int row, const PlaceOfRow& place, SharedAddress weights, bool writes_lse) {
  constexpr int PARTS = T::PARTS_MAX / WARP;  // of a lane
  const int lane = thread_index() % WARP;
  const int64 rows = rows_of(params);
  float part[PARTS];  // its lse in the log2 domain, then its weight: two arrays would spill
  float max = -infinity(), sum = 0.0f;
#pragma unroll
  for (int i = 0; i < PARTS; ++i) {
    const int split = lane + i * WARP;
    part[i] = -infinity();
    if (i * WARP < params.splits)
      part[i] = split < params.splits ? load_global_4(params.partial_lse + split * rows + row) : -infinity();
    max = fmaxf(max, part[i]);
  }
#pragma unroll
  for (int mask = WARP / 2; mask > 0; mask /= 2) max = fmaxf(max, shuffle_xor(max, mask));
  const float base = max == -infinity() ? 0.0f : max;
#pragma unroll
  for (int i = 0; i < PARTS; ++i)
    if (i * WARP < params.splits) sum += part[i] = exp2_approx(part[i] - base);
#pragma unroll
  for (int mask = WARP / 2; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
  const float factor = finish_row<T>(params, row, place, max, sum, lane == 0 && writes_lse);
#pragma unroll
  for (int i = 0; i < PARTS; ++i)
    if (const int split = lane + i * WARP; split < params.splits)
      store_shared_4(weights + split * 4, float_bits(part[i] * factor));
  if constexpr (T::HAS_MAX) {
    float top = top_of_parts(params, params.tops.of, row, lane, WARP);
#pragma unroll
    for (int mask = WARP / 2; mask > 0; mask /= 2) top = fmaxf(top, shuffle_xor(top, mask));
    if (lane == 0 && writes_lse && place.is_owned<T>(params)) store_global_4(params.tops.of.row_max + row, top * LN_2);
  }
}

// A thread's columns of AHEAD parts of a row, every `step`-th from one on; those behind the last are the last.
template <class T>
struct PartColumns {
  Chunk part[T::AHEAD][2];

  DEVICE void load(const float* parts, int64 pitch, int first, int step, int splits) {
#pragma unroll
    for (int i = 0; i < T::AHEAD; ++i) {
      const float* source = parts + min(first + i * step, splits - 1) * pitch;
      part[i][0] = load_global_16(source);
      part[i][1] = load_global_16(source + 4);
    }
  }
};

// Adds a part's columns, which mean nothing where its weight is zero.
DEVICE void add_part(float (&sum)[CHUNK_ELEMENTS], const Chunk (&part)[2], float weight) {
#pragma unroll
  for (int i = 0; i < CHUNK_ELEMENTS; ++i)
    sum[i] += weight == 0.0f ? 0.0f : weight * float_of_bits(part[i / 4].word[i % 4]);
}

// A block owns COLUMNS of neighbouring rows: of as many as leave a slot for each part and a warp for each row, or one. So a few
// rows with many parts are read by many SMs.
template <class T>
DEVICE void merge_splits(const typename T::Params& params) {
  const int block = static_cast<int>(block_index()), first_column = block % T::COLUMN_BLOCKS * T::COLUMNS;
  const int rows = static_cast<int>(rows_of(params)), first_row = block / T::COLUMN_BLOCKS * params.merged_rows;
  const int own_rows = min(params.merged_rows, rows - first_row);
  const int thread = thread_index(), warp = thread / WARP, slots_of_row = T::SLOTS / params.merged_rows;
  const PlaceOfRow place_of_warp = PlaceOfRow::of(params, first_row + warp);
  // A slot takes every slots_of_row-th part of its row.
  const int slot = thread / T::LANES, column = thread % T::LANES * CHUNK_ELEMENTS;  // of the block's
  const int row = slot / slots_of_row, first = slot % slots_of_row, step = T::AHEAD * slots_of_row;
  const bool has_row = row < own_rows && first_column + column < T::HEAD_DIM_V;
  const float* parts = params.partial_out + static_cast<int64>(first_row + row) * T::HEAD_DIM_V + first_column + column;
  const int64 pitch = static_cast<int64>(rows) * T::HEAD_DIM_V;
  follow_earlier_grids<T::OVERLAPS>();

  PartColumns<T> columns;  // on their way while their weights are found
  if (has_row) columns.load(parts, pitch, first, slots_of_row, params.splits);
  if (warp < own_rows)
    weigh<T>(params, first_row + warp, place_of_warp, shared_base() + warp * params.splits * 4, first_column == 0);
  sync_block();  // the weights are there

  const SharedAddress sums = shared_base() + T::SUMS_AT;
  if (has_row) {
    const SharedAddress weights = shared_base() + row * params.splits * 4;
    float sum[CHUNK_ELEMENTS] = {};
    for (int split = first; split < params.splits; split += step) {
#pragma unroll
      for (int i = 0; i < T::AHEAD; ++i)
        if (const int its_split = split + i * slots_of_row; its_split < params.splits)
          add_part(sum, columns.part[i], load_shared_4(weights + its_split * 4));
      if (split + step < params.splits) columns.load(parts, pitch, split + step, slots_of_row, params.splits);
    }
    const SharedAddress place = sums + (slot * T::SUMS_PITCH + column) * 4;
#pragma unroll
    for (int side = 0; side < 2; ++side)
      store_shared_16(place + 16 * side, chunk_of(sum + 4 * side));
  }
  sync_block();  // every slot's sum is there

  // A warp writes its row, a lane a column.
  if (warp >= own_rows || !place_of_warp.is_owned<T>(params)) return;
  const int lane = thread % WARP;
  float sum = 0.0f;
#pragma unroll 8
  for (int other = warp * slots_of_row; other < (warp + 1) * slots_of_row; ++other)
    sum += load_shared_4(sums + (other * T::SUMS_PITCH + lane) * 4);
  const float next = shuffle_xor(sum, 1);
  if (lane % 2 != 0 || first_column + lane >= T::HEAD_DIM_V) return;
  store_global_pair(place_of_warp.out(params) + first_column + lane, pack<typename T::Element>(sum, next));
}

template <class Element, MergeConfig C>
struct MergeFewTraits : AnyMergeTraits<Element, C> {
  static constexpr int CHUNKS = C.head_dim_v / CHUNK_ELEMENTS, ROWS = C.threads / CHUNKS;  // of a row; of a block
  static constexpr int SMEM_BYTES = 0;
  static_assert(C.parts_max % MergeFewTraits::AHEAD == 0 && ROWS > 0, "whole steps, a row or more");
};

// Merges few parts, of which there are many rows. A thread has a chunk of a row's columns, and needs no other thread.
template <class T>
DEVICE void merge_few_splits(const typename T::Params& params) {
  const int rows = static_cast<int>(rows_of(params)), splits = params.splits;
  const int row = static_cast<int>(block_index()) * T::ROWS + thread_index() / T::CHUNKS;
  const int column = thread_index() % T::CHUNKS * CHUNK_ELEMENTS;
  const PlaceOfRow place = PlaceOfRow::of(params, row);
  const float* parts = params.partial_out + static_cast<int64>(row) * T::HEAD_DIM_V + column;
  const int64 pitch = static_cast<int64>(rows) * T::HEAD_DIM_V;
  follow_earlier_grids<T::OVERLAPS>();
  if (row >= rows || thread_index() >= T::ROWS * T::CHUNKS) return;

  PartColumns<T> columns;  // on their way while their weights are found
  columns.load(parts, pitch, 0, 1, splits);
  float weight[T::PARTS_MAX];  // of a part: its lse in the log2 domain, then its weight
  float max = -infinity(), sum = 0.0f;
#pragma unroll
  for (int i = 0; i < T::PARTS_MAX; ++i) {
    weight[i] = i < splits ? load_global_4(params.partial_lse + static_cast<int64>(i) * rows + row) : -infinity();
    max = fmaxf(max, weight[i]);
  }
  const float base = max == -infinity() ? 0.0f : max;
#pragma unroll
  for (int i = 0; i < T::PARTS_MAX; ++i) sum += weight[i] = exp2_approx(weight[i] - base);
  const float factor = finish_row<T>(params, row, place, max, sum, column == 0);

  float value[CHUNK_ELEMENTS] = {};
#pragma unroll
  for (int first = 0; first < T::PARTS_MAX; first += T::AHEAD) {
    if (first >= splits) break;
    if (first > 0) columns.load(parts, pitch, first, 1, splits);
#pragma unroll
    for (int i = 0; i < T::AHEAD; ++i) add_part(value, columns.part[i], weight[first + i] * factor);
  }
  if (!place.is_owned<T>(params)) return;
  if constexpr (T::HAS_MAX)
    if (column == 0) store_global_4(params.tops.of.row_max + row, top_of_parts(params, params.tops.of, row, 0, 1) * LN_2);
  Chunk chunk;
#pragma unroll
  for (int w = 0; w < 4; ++w) chunk.word[w] = pack<typename T::Element>(value[2 * w], value[2 * w + 1]);
  store_global_16(place.out(params) + column, chunk);
}

}  // namespace multiattn
