// Short calls: ranks of a host that all wait for the same small collective exchange it themselves,
// in the threads that wait, without their engines. short_calls.py says when that is right.
//
// Ranks meet at a slot, a word in the memory of the host's first rank that all of them change by
// compare-and-swap:
//
//   tag      45 bits   which call: a digest of its request
//   parity    1 bit    of the round: every rank has two buffers for the data of a slot
//   arrived   9 bits   members that wait in this round
//   staying   9 bits   members that still read the buffers of the round before
//
// A member writes what it gives into the buffer of this parity, and arrives. The last one completes
// the round: the parity flips, and all members take what they need from the buffers, in the order of
// the members: they reduce a range of the data of all, or copy what each has for them. So a round is
// completed by all members or by none: who waits in vain withdraws by the same word, and finds out
// there whether it was too late for that.
//
// Where members may give different numbers of rows, these stand in front of the data, and decide how
// large the result is: the caller then takes by a call of its own.
//
// A larger reduction is divided into a range for each member: when the round is complete, members
// that are awake claim one range after the other, and reduce it into the buffer of its member. The
// last one to come wakes only as many as there are cores; the others sleep until the last range is
// reduced, and take all of them then. That is decided by one word, too: who waits in vain for a range
// abandons the round for all, and no member has written its result by then.
//
// No round is completed while a member still reads the buffers of the one before. So when a member
// writes a buffer, nobody reads what it wrote there two rounds ago. Another tag may take a slot in
// which nobody waits.

#pragma once

#include <linux/futex.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "board.h"
#include "chain.h"
#include "reducer.h"

struct ShortCall {
  // constant
  int64_t members, index;      // of the group, my place in it
  int64_t local_size;          // ranks of this host
  int64_t slot, tag;           // which slot, and which call
  int64_t data, data_bytes;    // where the buffers of the slot begin, and the size of one
  int64_t type, operation;     // of a reduction, as `reduce_of` knows them; operation -1: a copy
  int64_t itemsize;            // of a reduction
  int64_t root;                // the only member that gives; -1: all do
  int64_t counts;              // numbers of rows that each member tells: 0, 1, or one for each
  int64_t row_bytes;           // where rows are told
  int64_t scattered;           // whether no other member takes what I take
  int64_t divided;             // whether ranges are reduced once for all
  int64_t helpers;             // that the last member wakes to reduce ranges
  int64_t identity;            // of this library: all members must have the same
  double prescale, postscale;
  const int64_t* local;        // by member: its local number
  char* const* memory;         // by local number: the memory of that rank for short calls
  int64_t* rows;               // what I tell; then (set) the rows that I get from each member
  int64_t tensors;             // the data lie in so many places, reduced there; 0: see `input`
  const int64_t* sizes;        // by tensor: its size in bytes, `nbytes` in all
  // of each call
  int64_t nbytes;              // that I give, or that the root gives; 0 where there is no data
  int64_t start, taken;        // the range of what I give that I take, in bytes
  char* const* places;         // by tensor
  const char* input;
  char* output;
  int64_t timeout_ns, spin_ns;
  int64_t declines;            // how often this call went another way; -1: not known yet
  int64_t completed;           // the result: whether the round is complete
  int64_t told;                // otherwise: whether the others know that it will not be
  int64_t began_ns;            // when the last member came, of a complete round
  int64_t parity;              // of that round, until it is taken; -1 then
};

namespace {

constexpr int kTagBits = 45, kDeclineBits = 19;
constexpr uint64_t kDeclines = (1 << kDeclineBits) - 1;  // a number of declines, which wraps around
constexpr uint64_t kCount = (1 << 9) - 1;
constexpr uint32_t kAbandoned = 1u << 31;  // beside the number of ranges that are reduced,
constexpr uint32_t kLeft = 1u << 16;       // and that of members that have left since
constexpr int64_t kRangePatience = 10;     // so many times longer than for members, for their ranges

// The start of the memory of the host's first rank.
struct ShortSlot {
  uint64_t word;
  uint64_t declined;  // tag and number of the latest round that somebody will not come to
  uint32_t changes;     // what waiting members sleep on
  uint32_t reduced;     // ranges of the latest complete round that are reduced
  int64_t began_ns[2];  // by the parity of a round: when the last member came
  uint32_t claimed;     // ranges of that round that members have begun to reduce, or more
  char rest[kLine - 44];
};

struct ShortBoard {
  uint64_t open[kMaxMembers];  // by local rank: the identity of its library, 0 if it does not come
  ShortSlot slots[];
};

struct ShortWord {
  uint64_t tag, parity, arrived, staying;

  explicit ShortWord(uint64_t word)
      : tag(word >> 19), parity(word >> 18 & 1), arrived(word >> 9 & kCount),
        staying(word & kCount) {}

  uint64_t packed() const { return tag << 19 | parity << 18 | arrived << 9 | staying; }
};

uint64_t load(const uint64_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

int64_t nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t(now.tv_sec) * 1000000000 + now.tv_nsec;
}

void wake(ShortSlot* slot, int64_t members) {
  __atomic_fetch_add(&slot->changes, 1, __ATOMIC_SEQ_CST);
  syscall(SYS_futex, &slot->changes, FUTEX_WAKE, members, nullptr, nullptr, 0);
}

void wake_all(ShortSlot* slot) { wake(slot, INT32_MAX); }

class Exchange {
 public:
  explicit Exchange(ShortCall& call)
      : call_(call), board_((ShortBoard*)call.memory[0]), slot_(&board_->slots[call.slot]) {}

  void go() {
    came_ns_ = nanoseconds();
    if (is_declined()) return;
    if (call_.declines < 0) call_.declines = 0;
    if (!all_are_open() || !arrive()) return decline();
    if (!call_.completed && !wait()) return;
    call_.began_ns = __atomic_load_n(&slot_->began_ns[parity_], __ATOMIC_RELAXED);
    call_.parity = int64_t(parity_);
    if (call_.counts == 0) return take();
    int64_t mine = call_.counts > 1 ? call_.index : 0;
    for (int64_t m = 0; m < call_.members; ++m) call_.rows[m] = rows(m)[mine];
  }

  // Take what is mine of a round that is complete, and leave it; once.
  void take() {
    if (call_.parity < 0) return;
    parity_ = uint64_t(call_.parity);
    if (call_.divided) call_.completed = take_divided();
    else if (call_.tensors > 0) reduce_in_places();
    else if (call_.output != nullptr && call_.operation >= 0) reduce_range();
    else if (call_.output != nullptr) copy_all();
    __atomic_fetch_sub(&slot_->word, 1, __ATOMIC_RELEASE);  // `staying`
    call_.parity = -1;
  }

  void decline() {
    uint64_t declined = load(&slot_->declined);
    int64_t known = ahead(declined) > 1 ? number(declined) : call_.declines < 0 ? 0 : call_.declines;
    call_.declines = (known + 1) & kDeclines;
    call_.told = 1;
    __atomic_store_n(&slot_->declined,
                     uint64_t(call_.tag) << kDeclineBits | uint64_t(call_.declines),
                     __ATOMIC_SEQ_CST);
    wake_all(slot_);
  }

  // Count what the others have counted: all members have reported the latest call by now.
  void agree() {
    uint64_t declined = load(&slot_->declined);
    if (declined >> kDeclineBits == uint64_t(call_.tag)) call_.declines = number(declined);
  }

 private:
  ShortCall& call_;
  ShortBoard* board_;
  ShortSlot* slot_;
  uint64_t parity_ = 0;
  int64_t came_ns_ = 0;

  ShortWord word() const { return ShortWord(load(&slot_->word)); }

  bool change(const ShortWord& from, const ShortWord& to) {
    uint64_t expected = from.packed();
    return __atomic_compare_exchange_n(&slot_->word, &expected, to.packed(), false,
                                       __ATOMIC_SEQ_CST, __ATOMIC_RELAXED);
  }

  bool all_are_open() const {
    for (int64_t m = 0; m < call_.members; ++m)
      if (load(&board_->open[call_.local[m]]) != uint64_t(call_.identity)) return false;
    return true;
  }

  static int64_t number(uint64_t declined) { return int64_t(declined & kDeclines); }

  // How many times the others have declined this call more often than I know; 2 for my first call.
  int64_t ahead(uint64_t declined) const {
    if (declined >> kDeclineBits != uint64_t(call_.tag)) return 0;
    if (call_.declines < 0) return 2;
    int64_t more = int64_t((declined - uint64_t(call_.declines)) & kDeclines);
    return more <= int64_t(kDeclines / 2) ? more : 0;
  }

  // Whether another member goes another way in this round. The numbers of members may differ, where
  // only some have counted: the highest counts, and who lags behind tells those that may wait.
  bool is_declined() {
    uint64_t declined = load(&slot_->declined);
    int64_t more = ahead(declined);
    if (more == 0) return false;
    call_.declines = number(declined);
    call_.told = more == 1;
    return true;
  }

  char* buffer(int64_t member) const {
    char* memory = call_.memory[call_.local[member]];
    return memory + call_.data + parity_ * call_.data_bytes;
  }

  int64_t* rows(int64_t member) const { return (int64_t*)buffer(member); }

  // The data of a member, which begin at a line of the cache.
  const char* data(int64_t member) const {
    return member == call_.index ? call_.input : buffer(member) + head_bytes();
  }

  int64_t head_bytes() const { return (call_.counts * 8 + kLine - 1) & -kLine; }

  // Arrive in this round. False if other calls are at the slot.
  bool arrive() {
    for (bool written = false;;) {
      ShortWord seen = word(), next = seen;
      if (seen.arrived == 0)
        next.tag = call_.tag;
      else if (seen.tag != uint64_t(call_.tag))
        return false;
      if (gives() && !(written && parity_ == seen.parity)) {
        parity_ = seen.parity;
        write();
        written = true;
      }
      parity_ = seen.parity;
      note_coming();
      bool last = ++next.arrived == uint64_t(call_.members);
      if (last) {
        if (next.staying > 0) return false;
        next.parity ^= 1;
        next.arrived = 0;
        next.staying = call_.members;
      }
      if (!change(seen, next)) continue;
      if (last) {
        call_.completed = 1;
        wake(slot_, call_.divided ? call_.helpers : INT32_MAX);
      }
      return true;
    }
  }

  // Who comes last may arrive before others, which write what they give. Times of earlier rounds
  // are smaller, and who has yet to read that of the round before finds it at the other parity.
  void note_coming() const {
    int64_t* latest = &slot_->began_ns[parity_];
    int64_t seen = __atomic_load_n(latest, __ATOMIC_RELAXED);
    while (seen < came_ns_ && !__atomic_compare_exchange_n(latest, &seen, came_ns_, false,
                                                           __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
  }

  void write() const {
    char* to = buffer(call_.index);
    for (int64_t t = 0; t < call_.tensors; to += call_.sizes[t++])
      memcpy(to, call_.places[t], call_.sizes[t]);
    if (call_.tensors > 0) return;
    memcpy(to, call_.rows, call_.counts * sizeof(int64_t));
    write(0, call_.scattered ? call_.start : call_.nbytes);
    if (call_.scattered) write(call_.start + call_.taken, call_.nbytes);
  }

  void write(int64_t from, int64_t to) const {
    memcpy(buffer(call_.index) + head_bytes() + from, call_.input + from, to - from);
  }

  // Sleep until the round is complete. False if it is not complete in time: then I have withdrawn.
  bool wait() {
    int64_t now = nanoseconds(), spin_until = now + call_.spin_ns;
    int64_t until = now + call_.timeout_ns;
    while (!is_complete()) {
      uint32_t changes = __atomic_load_n(&slot_->changes, __ATOMIC_SEQ_CST);
      if (is_complete()) break;
      bool declined = is_declined();
      now = nanoseconds();
      if (declined || now >= until || !all_are_open()) {
        if (!withdraw()) break;
        if (!declined) decline();
        return false;
      }
      if (now < spin_until) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
        continue;
      }
      sleep(changes, until - now);
    }
    call_.completed = 1;
    return true;
  }

  // Sleep until something has changed since `changes`, for so long at most.
  void sleep(uint32_t changes, int64_t ns) const {
    timespec limit = {time_t(ns / 1000000000), long(ns % 1000000000)};
    syscall(SYS_futex, &slot_->changes, FUTEX_WAIT, changes, &limit, nullptr, 0);
  }

  // The parity flips when I have arrived, and only once before I arrive again.
  bool is_complete() const { return word().parity != parity_; }

  // Return whether I could withdraw before the round was complete.
  bool withdraw() {
    for (;;) {
      ShortWord seen = word(), next = seen;
      if (seen.parity != parity_) return false;
      --next.arrived;
      if (change(seen, next)) return true;
    }
  }

  // Whether others read what I tell and my data.
  bool gives() const {
    return call_.data > 0 && (call_.root < 0 || call_.root == call_.index);
  }

  void reduce_in_places() const {
    for (int64_t t = 0, start = 0; t < call_.tensors; start += call_.sizes[t++])
      reduce(call_.places[t], start, call_.sizes[t], call_.places[t]);
  }

  void reduce_range() const {
    reduce(call_.input + call_.start, call_.start, call_.taken, call_.output);
  }

  // Reduce `size` bytes that lie `start` behind the beginning of the others' buffers.
  void reduce(const char* own, int64_t start, int64_t size, char* output) const {
    const char* parts[kMaxMembers];
    for (int64_t m = 0; m < call_.members; ++m)
      parts[m] = m == call_.index ? own : buffer(m) + start;
    reduce_of(call_.type, call_.operation)(call_.members, call_.prescale, call_.postscale, parts,
                                           size / call_.itemsize, output, nullptr);
  }

  // A divided reduction. The ranges begin at lines of the cache.

  int64_t start_of(int64_t member) const {
    if (member == call_.members) return call_.nbytes;
    return call_.nbytes / kLine * member / call_.members * kLine;
  }

  // Of the members that are all still staying, the last one clears what was counted.
  bool take_divided() const {
    bool done = reduce_for_all();
    if (done) take_ranges();
    uint32_t left = __atomic_add_fetch(&slot_->reduced, kLeft, __ATOMIC_SEQ_CST);
    if ((left & ~kAbandoned) / kLeft == uint32_t(call_.members)) {
      __atomic_store_n(&slot_->claimed, 0, __ATOMIC_SEQ_CST);
      __atomic_store_n(&slot_->reduced, 0, __ATOMIC_SEQ_CST);
    }
    return done;
  }

  // Reduce ranges while there are any, and wait for the rest. False if the round was abandoned.
  bool reduce_for_all() const {
    uint32_t all = uint32_t(call_.members), seen;
    while ((seen = __atomic_fetch_add(&slot_->claimed, 1, __ATOMIC_SEQ_CST)) < all) {
      int64_t start = start_of(seen), size = start_of(seen + 1) - start;
      reduce(buffer(call_.index) + start, start, size, buffer(seen) + start);
      if (__atomic_add_fetch(&slot_->reduced, 1, __ATOMIC_SEQ_CST) == all) wake_all(slot_);
    }
    int64_t until = nanoseconds() + kRangePatience * call_.timeout_ns;
    for (;;) {
      uint32_t changes = __atomic_load_n(&slot_->changes, __ATOMIC_SEQ_CST);
      seen = __atomic_load_n(&slot_->reduced, __ATOMIC_SEQ_CST);
      if (seen & kAbandoned) return false;
      if (seen % kLeft == all) return true;
      int64_t now = nanoseconds();
      if (now < until) {
        sleep(changes, until - now);
      } else if (__atomic_compare_exchange_n(&slot_->reduced, &seen, seen | kAbandoned, false,
                                             __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) {
        wake_all(slot_);
        return false;
      }
    }
  }

  void take_ranges() const {
    if (call_.tensors == 0) take_ranges(call_.output, 0, call_.nbytes);
    for (int64_t t = 0, start = 0; t < call_.tensors; start += call_.sizes[t++])
      take_ranges(call_.places[t], start, call_.sizes[t]);
  }

  // Copy what lies `start` behind the beginning of the data, from those who have reduced it.
  void take_ranges(char* target, int64_t start, int64_t size) const {
    for (int64_t m = 0, stop = start + size; m < call_.members && start < stop; ++m) {
      int64_t end = start_of(m + 1) < stop ? start_of(m + 1) : stop;
      if (end <= start) continue;
      memcpy(target, buffer(m) + start, end - start);
      target += end - start;
      start = end;
    }
  }

  void copy_all() const {
    char* target = call_.output;
    for (int64_t m = 0; m < call_.members; ++m) {
      if (call_.root >= 0 && call_.root != m) continue;
      const char* source = data(m) + before_mine(m);
      int64_t bytes = call_.counts == 0 ? call_.nbytes : call_.rows[m] * call_.row_bytes;
      if (target != source) memmove(target, source, bytes);  // of the root, they may overlap
      target += bytes;
    }
  }

  // The bytes that a member has for others before those for me.
  int64_t before_mine(int64_t member) const {
    int64_t before = 0;
    for (int64_t m = 0; call_.counts > 1 && m < call_.index; ++m) before += rows(member)[m];
    return before * call_.row_bytes;
  }
};

}  // namespace

extern "C" {

// Exchange one call with all members; `completed` says whether that was done, or nothing was. Where
// rows are told, the result is to be taken then.
void hvdlite_short_call(ShortCall* call) {
  call->completed = call->told = 0;
  Exchange(*call).go();
}

// Take the result of a call that is complete, where rows are told. Without output: take nothing.
void hvdlite_take_short_call(ShortCall* call) { Exchange(*call).take(); }

// Tell whether the rank with this local number comes: its identity, or 0. Who waits looks again.
void hvdlite_open_short_calls(char* memory, int64_t own, int64_t identity, int64_t slots) {
  ShortBoard* board = (ShortBoard*)memory;
  __atomic_store_n(&board->open[own], uint64_t(identity), __ATOMIC_SEQ_CST);
  for (int64_t slot = 0; slot < slots; ++slot) wake_all(&board->slots[slot]);
}

// Tell members that wait at the slot of this call that this rank goes another way.
void hvdlite_decline_short_call(ShortCall* call) { Exchange(*call).decline(); }

// Count the declines of this call as all members do, after all have reported it.
void hvdlite_agree_on_short_call(ShortCall* call) { Exchange(*call).agree(); }
}
