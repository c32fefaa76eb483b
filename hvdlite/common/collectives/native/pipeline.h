// The pipeline that all collectives of one host go through, piece by piece.
//
//   pack     copy what others need of a piece into my slot
//   reduce   allreduce only: my part over all members, into my tensor, and into my slot
//   unpack   copy, or reduce, what I need from the slots of the others, into my tensor
//
// A rank does whatever can be done, the oldest piece first: it may be as many pieces ahead of the
// slowest one as there are slots, and sleeps only when nothing can be done. It can be done when the
// peers have come so far:
//
//   reduce piece j   those who give have packed j
//   unpack piece j   those who give have reduced j (packed, where nothing is reduced between)
//   pack piece j     those who take have unpacked j - slots, so that nobody reads my slot any more
//
// They tell so by counters on their boards, one set for each peer, since the sets of ranks that
// work together differ. A rank that sleeps names the peer it waits for; only that one wakes it.
// The rank whose piece is the oldest of all can always go on, so no ranks can wait for each other.
//
// To wake a rank takes as long as to copy a piece, on both sides. So a rank that has nothing to do in
// a long segment sleeps until there are several pieces to unpack, or as many free slots: `many` says
// how many. It waits for no more pieces than it has given itself, so that the rank that has given the
// fewest, of those that sleep, waits for none that is not there: each peer has given as many. And a
// rank that waits for free slots waits for half of them at most: whoever is so far behind has so many
// pieces to unpack.

#pragma once

#include <stdint.h>

#include "board.h"
#include "segment.h"

namespace {

constexpr int64_t kDone = 0, kWaiting = 1, kCounted = 2;
constexpr int64_t kAll = -1;  // members
constexpr int64_t kWakes = 16;  // of a rank in a long segment, at least

// `Steps` derives from it and has the steps; it may say who gives, and who takes.
template <class Steps>
class Pipeline {
 public:
  explicit Pipeline(Segment& segment)
      : work_(segment.work),
        progress_(segment.progress),
        stores_(*segment.work.stores),
        boards_(segment.group) {}

  // Run until all is done, or a rank has not come in time: then a new pipeline goes on.
  int64_t go() {
    if (progress_.packed == 0 && self().gives(me()) && !boards_.nobody_reads()) return kWaiting;
    return run();
  }

  static constexpr bool kReducesBetween = false;
  bool gives(int64_t member) const { return true; }
  bool takes(int64_t member) const { return true; }
  void reduce(int64_t piece, bool streamed) {}

 protected:
  const Work& work_;
  Progress& progress_;
  SlotStores& stores_;
  const Boards boards_;

  int64_t members() const { return boards_.members(); }
  int64_t me() const { return boards_.me(); }

  int64_t run() {
    while (progress_.unpacked < progress_.pieces) {
      bool unpacked = try_unpack(), reduced = try_reduce(), packed = try_pack();
      if (!unpacked && !reduced && !packed && !wait_for_the_oldest()) return kWaiting;
    }
    boards_.finish(progress_.pieces);
    return kDone;
  }

  int64_t slot_of(int64_t piece) const { return piece % boards_.slots(); }

  // Whether pieces are timed, and go into the slots as trials say: few pieces stay in the caches.
  bool tries() const {
    return kStreams && stores_.stores == kMeasured && progress_.pieces > boards_.slots() &&
           boards_.slots() <= kTimedSlots;
  }

  // Steps call it to read what `member` has put into its slot, or, with kAll, what all have: it tells
  // them how long that took. Nobody reads the next piece of a slot before its owner has used that.
  template <class Read>
  void timed_read(int64_t piece, int64_t member, Read read) const {
    if (!tries()) return read();
    int64_t start = now_ns();
    read();
    int64_t ns = now_ns() - start;
    bool second = Steps::kReducesBetween && member != kAll;  // what is unpacked was reduced before
    for (int64_t m = 0; m < members(); ++m)
      if (m != me() && (member == kAll || member == m))
        boards_.tell_time(m, slot_of(piece), ns, second);
  }

  void pack_next() {
    int64_t piece = progress_.packed++;
    bool streamed = choose_stores(piece);
    timed(piece, [&] {
      self().pack(piece, streamed);
      if (streamed) end_of_stream();
    });
    if (!Steps::kReducesBetween) progress_.reduced = progress_.packed;
    if (self().gives(me())) boards_.tell(&Counters::packed, progress_.packed);
  }

 private:
  static constexpr Counter kGiven =
      Steps::kReducesBetween ? &Counters::reduced : &Counters::packed;

  Steps& self() { return static_cast<Steps&>(*this); }
  const Steps& self() const { return static_cast<const Steps&>(*this); }

  // A member that must come to `pieces` and has not yet; -1: all have.
  int64_t behind(Counter counter, int64_t pieces) const {
    bool freeing = counter == &Counters::unpacked;
    if (pieces <= 0 || !(freeing ? self().gives(me()) : self().takes(me()))) return -1;
    for (int64_t m = 0; m < members(); ++m)
      if (m != me() && (freeing ? self().takes(m) : self().gives(m)) &&
          !boards_.has_come(m, counter, pieces))
        return m;
    return -1;
  }

  // Run a step that stores into my slot, and add its time to what the piece takes.
  template <class Step>
  void timed(int64_t piece, Step step) {
    if (!tries()) return step();
    int64_t start = now_ns();
    step();
    int64_t& own = stores_.own[slot_of(piece)];
    if (own != kUntimed) own += now_ns() - start;
  }

  // Return whether the piece that I pack now is streamed.
  bool choose_stores(int64_t piece) {
    int64_t slot = slot_of(piece);
    bool streamed = kStreams && stores_.stores == kAllStreamed;
    if (tries() && self().gives(me())) {
      streamed = stores_.next(slot, me(), time_of_last(piece));
    } else {
      stores_.mark(slot, streamed);
    }
    // The first piece of an alltoall is not timed.
    if (slot < kTimedSlots) stores_.own[slot] = tries() ? 0 : kUntimed;
    return streamed;
  }

  // How long the last piece in this slot took: to store it, and to read it for the slowest taker.
  int64_t time_of_last(int64_t piece) const {
    int64_t slot = slot_of(piece), own = stores_.own[slot];
    return piece < boards_.slots() || own == kUntimed ? kUntimed : own + slowest_reader(slot);
  }

  int64_t slowest_reader(int64_t slot) const {
    int64_t slowest = 0;
    for (int64_t m = 0; m < members(); ++m)
      if (m != me() && self().takes(m) && slowest < boards_.time_of(m, slot))
        slowest = boards_.time_of(m, slot);
    return slowest;
  }

  bool try_unpack() {
    if (progress_.unpacked == progress_.reduced || behind(kGiven, progress_.unpacked + 1) >= 0)
      return false;
    int64_t piece = progress_.unpacked++;
    self().unpack(piece);
    if (self().takes(me()) || progress_.unpacked == progress_.pieces)
      boards_.tell(&Counters::unpacked, progress_.unpacked);
    return true;
  }

  bool try_reduce() {
    if (progress_.reduced == progress_.packed ||
        behind(&Counters::packed, progress_.reduced + 1) >= 0)
      return false;
    int64_t piece = progress_.reduced++;
    bool streamed = stores_.streamed >> slot_of(piece) & 1;
    timed(piece, [&] {
      self().reduce(piece, streamed);
      if (streamed) end_of_stream();
    });
    boards_.tell(&Counters::reduced, progress_.reduced);
    return true;
  }

  bool try_pack() {
    if (progress_.packed == progress_.pieces ||
        progress_.packed == progress_.unpacked + boards_.slots() ||
        behind(&Counters::unpacked, progress_.packed + 1 - boards_.slots()) >= 0)
      return false;
    pack_next();
    return true;
  }

  bool wait_for_the_oldest() const {
    int64_t ready = progress_.reduced - progress_.unpacked;
    if (ready > 0) return wait(kGiven, progress_.unpacked + many(ready));
    if (progress_.reduced < progress_.packed) return wait(&Counters::packed, progress_.reduced + 1);
    int64_t freed = many(progress_.pieces - progress_.packed);
    return wait(&Counters::unpacked, progress_.packed + freed - boards_.slots());
  }

  // For how many pieces to sleep, `most` at most. The first one is worth a wake-up: all wait for it.
  int64_t many(int64_t most) const {
    if (Steps::kReducesBetween || progress_.unpacked == 0) return 1;
    int64_t few = progress_.pieces / kWakes < most ? progress_.pieces / kWakes : most;
    return few < 1 ? 1 : few < boards_.slots() / 2 ? few : boards_.slots() / 2;
  }

  bool wait(Counter counter, int64_t pieces) const {
    int64_t member = behind(counter, pieces);
    return member < 0 || boards_.wait(member, counter, pieces);
  }
};

}  // namespace
