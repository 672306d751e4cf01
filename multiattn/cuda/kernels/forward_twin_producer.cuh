// The warps of forward_twin.cuh that load: pieces of K and V in the order in which they are used, as `PieceOrder` has it.
#pragma once
#include "forward_twin_rows.cuh"

namespace multiattn {

// Boxes of a tensor, by one thread.
template <class T>
class TwinBoxes {
  using Layout = TwinLayout<T>;

 public:
  DEVICE TwinBoxes(const typename T::Params& params, const TwinQueries<T>& rows) : params_(params), rows_(rows) {}

  static constexpr DEVICE int look_up(int) { return 0; }
  DEVICE void load_k(int block, int, int piece) { load(params_.map_k, block, piece); }
  DEVICE void load_v(int block, int, int piece) { load(params_.map_v, block, piece); }
  static DEVICE void finish_tile() {}

 private:
  DEVICE void load(const TensorMap& map, int block, int piece) {
    const auto ring = Layout::ring();
    const SharedAddress barrier = ring.full(place_.slot);
    ring.await_empty(place_);
    mbarrier_arrive_expect(barrier, T::Piece::BYTES);
#pragma unroll
    for (int panel = 0; panel < T::Piece::PANELS; ++panel)
      load_box(Layout::piece(place_.slot) + panel * T::Piece::PANEL_BYTES, map, barrier,
               piece * T::PIECE + panel * T::Piece::PANEL_COLUMNS, block * T::TILE_N, rows_.head_kv, keys_of(rows_.tile));
    place_.advance();
  }

  const typename T::Params& params_;
  const TwinQueries<T>& rows_;
  RingPlace<T::SLOTS> place_;
};

// Boxes of a cache, by one warp, of which a lane has one box of every piece. A box whose keys are all beyond the last, or freed, is not
// loaded: its entry of the table may name anything.
template <class T>
class TwinCacheBoxes : FreedKeys<FREES_KEYS<T::BAND, T::PAGING>> {
  using Freed = FreedKeys<FREES_KEYS<T::BAND, T::PAGING>>;
  using Layout = TwinLayout<T>;
  static constexpr int BOXES_OF_PANEL = T::TILE_N / T::BOX_ROWS;

 public:
  DEVICE TwinCacheBoxes(const typename T::Params& params, const TwinGroups<T>& rows)
      : Freed(rows.owned), params_(params), owned_(rows.owned) {
    static_assert(BOXES_OF_PANEL * T::Piece::PANELS <= WARP, "a lane for each box of a piece");
  }

  // The page of the lane's box.
  DEVICE int look_up(int block) const {
    const int key = block * T::TILE_N + row_of_tile();
    if (!T::IS_PAGED || key >= owned_.len_kv || is_freed_box(key)) return 0;
    return owned_.page_of(key);
  }
  DEVICE void load_k(int block, int page, int piece) { load(params_.map_k, block, page, piece); }
  DEVICE void load_v(int block, int page, int piece) { load(params_.map_v, block, page, piece); }
  static DEVICE void finish_tile() {}

 private:
  static DEVICE int lane() { return thread_index() % WARP; }
  static DEVICE int row_of_tile() { return lane() % BOXES_OF_PANEL * T::BOX_ROWS; }
  struct Place {
    int entry, row;
  };
  DEVICE Place place_of(int key, int page) const {
    if constexpr (T::IS_PAGED) return {page, PlaceOfKey::of(params_.forward, key).row};
    return {owned_.sequence, key};
  }
  // True if a box is freed, by its first key.
  DEVICE bool is_freed_box(int key) const { return Freed::is_freed(key + T::BOX_ROWS - 1); }

  DEVICE void load(const TensorMap& map, int block, int page, int piece) {
    const auto ring = Layout::ring();
    const int first_key = block * T::TILE_N, key = first_key + row_of_tile(), panel = lane() / BOXES_OF_PANEL;
    const int end = min((owned_.len_kv - first_key - 1) / T::BOX_ROWS + 1, BOXES_OF_PANEL);
    const int boxes = (end - Freed::before(first_key) / T::BOX_ROWS) * T::Piece::PANELS;
    ring.await_empty(place_);
    if (lane() == 0) mbarrier_arrive_expect(ring.full(place_.slot), boxes * T::BOX_ROWS * T::Piece::ROW_BYTES);
    sync_warp();  // the phase expects its bytes before they come
    if (panel < T::Piece::PANELS && key < owned_.len_kv && !is_freed_box(key)) {
      const Place place = place_of(key, page);
      const int column = piece * T::PIECE + panel * T::Piece::PANEL_COLUMNS;
      tma_load(Layout::piece(place_.slot) + panel * T::Piece::PANEL_BYTES + row_of_tile() * T::Piece::ROW_BYTES, map,
               ring.full(place_.slot), column, place.row, owned_.head_kv, place.entry);
    }
    sync_warp();
    place_.advance();
  }

  const typename T::Params& params_;
  const Owned<T>& owned_;
  RingPlace<T::SLOTS> place_;
};

// Four warps gather keys one by one with cp.async, so that pages have any size. A warp has a share of the keys of each piece, and a lane
// knows where one of them is. Eight lanes copy 128 bytes of a key at a time. Copies land late, so a piece is told of as full when
// LAG younger ones of its tile are on their way.
template <class T>
class TwinGather : FreedKeys<FREES_KEYS<T::BAND, T::PAGING>> {
  using Freed = FreedKeys<FREES_KEYS<T::BAND, T::PAGING>>;
  using Layout = TwinLayout<T>;
  static constexpr int KEYS = T::TILE_N / T::LOADING_WARPS;  // of a warp
  static constexpr int CHUNKS = 8, KEYS_OF_PASS = WARP / CHUNKS;
  static constexpr int LAG = T::V_IN_K ? T::K_PIECES / 2 : 2;

 public:
  DEVICE TwinGather(const typename T::Params& params, const TwinGroups<T>& rows)
      : Freed(rows.owned), params_(params.forward), owned_(rows.owned) {}

  // The page of the lane's key.
  DEVICE int look_up(int block) const {
    const int key = first_key(block) + lane() % KEYS;
    if (!T::IS_PAGED || key >= owned_.len_kv || Freed::is_freed(key)) return 0;
    return owned_.page_of(key);
  }
  DEVICE void load_k(int block, int page, int piece) { load<T::HEAD_DIM>(params_.k, params_.strides_k, block, page, piece); }
  DEVICE void load_v(int block, int page, int piece) { load<T::HEAD_DIM_V>(params_.v, params_.strides_v, block, page, piece); }
  // Slots of the next tile may not be empty before this one was used: nothing of it may be left untold.
  DEVICE void finish_tile() {
    for (; loaded_ > 0; --loaded_) tell<0>();
  }

 private:
  static DEVICE int lane() { return thread_index() % WARP; }
  static DEVICE int first_row() { return thread_index() % WARPGROUP / WARP * KEYS; }
  static DEVICE int first_key(int block) { return block * T::TILE_N + first_row(); }

  // Keys beyond the last, or freed, and columns beyond COLUMNS become zeros.
  template <int COLUMNS>
  DEVICE void load(const void* tensor, const Strides& strides, int block, int page, int piece) {
    const int first = first_key(block), own = first + lane() % KEYS, chunk = lane() % CHUNKS;
    const int64 entry = T::IS_PAGED ? page : owned_.sequence, row = T::IS_PAGED ? PlaceOfKey::of(params_, own).row : own;
    const uint64 offset = static_cast<uint64>(entry * strides.batch + row * strides.seq);  // of the lane's key
    const int column = piece * T::PIECE + chunk * CHUNK_ELEMENTS;
    const uint16* head = static_cast<const uint16*>(tensor) + owned_.head_kv * strides.head + column;
    const SharedAddress target = Layout::piece(place_.slot);
    Layout::ring().await_empty(place_);
    sync_warp();
#pragma unroll
    for (int pass = 0; pass < KEYS / KEYS_OF_PASS; ++pass) {
      const int key = pass * KEYS_OF_PASS + lane() / CHUNKS;  // of the warp's
      const uint64 low = shuffle(static_cast<uint32>(offset), key), high = shuffle(static_cast<uint32>(offset >> 32), key);
      const uint16* source = head + static_cast<int64>(high << 32 | low);
      const bool is_key = first + key < owned_.len_kv && !Freed::is_freed(first + key);
#pragma unroll
      for (int panel = 0; panel < T::Piece::PANELS; ++panel)
        cp_async_16(T::Piece::Panel::chunk(target + panel * T::Piece::PANEL_BYTES, first_row() + key, chunk),
                    source + panel * T::Piece::PANEL_COLUMNS, is_key && column + panel * T::Piece::PANEL_COLUMNS < COLUMNS);
    }
    cp_async_commit();
    place_.advance();
    if (loaded_ < LAG) ++loaded_;
    else tell<LAG>();
  }

  // The oldest piece that was not told of is full: at most LEFT younger ones may be on their way.
  template <int LEFT>
  DEVICE void tell() {
    cp_async_wait<LEFT>();
    fence_async_shared();
    sync_warp();  // all lanes' copies are there, for wgmma too
    if (lane() == 0) mbarrier_arrive(Layout::ring().full(told_.slot));
    sync_warp();
    told_.advance();
  }

  const SplitParams& params_;
  const Owned<T>& owned_;
  RingPlace<T::SLOTS> place_, told_;
  int loaded_ = 0;  // pieces that were not told of
};

template <class T>
using TwinLoader = typename Choice<!T::GROUPED, TwinBoxes<T>,
                                   typename Choice<T::GATHERS, TwinGather<T>, TwinCacheBoxes<T>>::Type>::Type;

// Loads the blocks of keys from the last to the first. Pages are looked up two blocks ahead, so that nobody waits for the table.
template <class T>
DEVICE void produce_pieces(const typename T::Params& params, const TwinRows<T>& rows) {
  using Order = PieceOrder<T>;
  const int turns = rows.blocks.end - rows.blocks.begin;
  TwinLoader<T> keys(params, rows);
  const auto block = [&](int turn) { return rows.blocks.end - 1 - turn; };
  const auto look_up = [&](int turn) { return turn < turns ? keys.look_up(block(turn)) : 0; };
  const auto load_k = [&](int turn, int page) {
    for (int i = 0; i < T::K_PIECES; ++i) keys.load_k(block(turn), page, Order::piece_of_k(i, turn));
    keys.finish_tile();
  };
  if (turns <= 0) return;
  int page = look_up(0), next = look_up(1), after_next = look_up(2);
  load_k(0, page);
#pragma unroll 1  // a producer has few registers
  for (int turn = 0; turn < turns; ++turn) {
    if (turn + 1 < turns) load_k(turn + 1, next);
    if constexpr (!T::V_IN_K) {
      for (int i = 0; i < T::V_PIECES; ++i) keys.load_v(block(turn), page, Order::piece_of_v(i, turn));
      keys.finish_tile();
    }
    page = next;
    next = after_next;
    after_next = look_up(turn + 3);
  }
}

}  // namespace multiattn
