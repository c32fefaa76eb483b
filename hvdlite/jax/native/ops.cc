// Two functions of XLA's foreign function interface with which a compiled program runs collectives.
//
//   hvdlite_start ... hvdlite_start   puts a collective into a queue; never waits, takes no GIL
//             \   /
//         hvdlite_take                ends when the last of them has ended; no thread waits for that
//
// The memory of a collective is its own: a program that fails between the two frees what XLA has
// given it, while the engine still reads and writes. A start copies the inputs, a take the results.
//
// One thread of Python's empties the queue (hvdlite_next), starts the collectives in the engine, and
// tells how each has ended (hvdlite_end). executions.py is the other side of the C functions below.

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace hvdlite {
namespace {

namespace ffi = xla::ffi;

constexpr size_t kAlignment = 64;
constexpr size_t kFailedRuns = 64;

// Memory that a later collective of the same size takes over: new memory costs a fault for each page.
// As much is kept as was once in use at a time; what has lain longest is freed.
struct Block {
  char* start = nullptr;
  size_t size = 0;
};

struct Place {
  size_t offset, size;
};

struct Gathering;

// One collective on its way, known to the program by the number in its ticket.
struct Collective {
  int64_t call = 0;
  int64_t run = 0;  // of the program that has started it
  Block block;
  std::vector<Place> places;   // of the inputs that are not results too, then of the results
  size_t first_result = 0;
  // All below is guarded by the queue's mutex.
  bool ended = false;
  std::string failure;
  std::shared_ptr<Gathering> gathering;  // waits for this collective

  ~Collective();
};

using CollectivePointer = std::shared_ptr<Collective>;

// One execution of hvdlite_take.
struct Gathering {
  ffi::Promise promise;
  std::vector<CollectivePointer> collectives;
  std::vector<char*> results;  // where the program has them, until the promise is kept
  size_t missing = 0;          // collectives that have not ended; guarded by the queue's mutex
};

// What both sides share. Never destroyed: threads may still wait for it when the process ends.
struct Queue {
  std::mutex mutex;
  std::condition_variable arrived;
  std::vector<CollectivePointer> waiting;
  std::unordered_map<uint32_t, CollectivePointer> open;  // by their tickets, until they are taken
  uint32_t last_ticket = 0;
  std::deque<int64_t> failed;  // runs that have failed lately: nobody takes what they start
  std::list<Block> unused;  // that which has lain longest is the first
  std::unordered_map<size_t, std::vector<std::list<Block>::iterator>> unused_of;  // by their size
  size_t unused_bytes = 0, used_bytes = 0, most_used_bytes = 0;
};

std::atomic<pid_t> served_in = -1;  // the process that has Python's thread; a forked child has none

Queue& queue() {
  static Queue* instance = new Queue;
  return *instance;
}

Block block_of(size_t size) {
  if (size == 0) return {};
  {
    std::lock_guard<std::mutex> lock(queue().mutex);
    Queue& all = queue();
    all.used_bytes += size;
    all.most_used_bytes = std::max(all.most_used_bytes, all.used_bytes);
    auto found = all.unused_of.find(size);
    if (found != all.unused_of.end()) {
      const auto place = found->second.back();
      found->second.pop_back();
      if (found->second.empty()) all.unused_of.erase(found);
      const Block block = *place;
      all.unused.erase(place);
      all.unused_bytes -= size;
      return block;
    }
  }
  char* start = static_cast<char*>(std::aligned_alloc(kAlignment, size));
  if (start == nullptr) {
    std::lock_guard<std::mutex> lock(queue().mutex);
    queue().used_bytes -= size;
  }
  return {start, size};
}

Collective::~Collective() {
  if (block.start == nullptr) return;
  std::vector<char*> freed;  // without the mutex
  {
    std::lock_guard<std::mutex> lock(queue().mutex);
    Queue& all = queue();
    all.used_bytes -= block.size;
    all.unused_of[block.size].push_back(all.unused.insert(all.unused.end(), block));
    all.unused_bytes += block.size;
    while (all.unused_bytes > all.most_used_bytes) {
      const Block oldest = all.unused.front();
      auto found = all.unused_of.find(oldest.size);
      found->second.erase(found->second.begin());  // The first of its size has lain longest, too.
      if (found->second.empty()) all.unused_of.erase(found);
      all.unused.pop_front();
      all.unused_bytes -= oldest.size;
      freed.push_back(oldest.start);
    }
  }
  for (char* start : freed) std::free(start);
}

using Ticket = ffi::BufferR0<ffi::U32>;

// Operands: a token, and the inputs. Results: a token, and a ticket. `sizes` are those of the results
// in bytes; there are none where each result takes the place of its input.
ffi::Error start(ffi::RunId run, ffi::RemainingArgs operands, ffi::RemainingRets results,
                 int64_t call, ffi::Span<const int64_t> sizes) {
  // Before any mutex: in a forked child it may be locked for ever.
  if (served_in != getpid()) {
    return ffi::Error(ffi::ErrorCode::kUnknown,
                      "this process was forked from a rank and is no rank itself: run collectives "
                      "in the parent, or start it with spawn");
  }
  auto collective = std::make_shared<Collective>();
  collective->call = call;
  collective->run = run.run_id;
  size_t end = 0;
  auto add = [&](size_t size) {
    collective->places.push_back({end, size});
    end += (size + kAlignment - 1) / kAlignment * kAlignment;
  };
  const size_t inputs = operands.size() - 1;
  for (size_t i = 0; i < inputs; ++i) {
    auto input = operands.get<ffi::AnyBuffer>(i + 1);
    if (!input.has_value()) return input.error();
    add(input->size_bytes());
  }
  if (sizes.size() != 0) collective->first_result = inputs;
  for (const int64_t size : sizes) add(size);
  collective->block = block_of(end);
  if (end != 0 && collective->block.start == nullptr) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                      "no memory for a collective of " + std::to_string(end) + " bytes");
  }
  for (size_t i = 0; i < inputs; ++i) {
    auto input = operands.get<ffi::AnyBuffer>(i + 1);
    const Place place = collective->places[i];
    if (place.size != 0) {
      std::memcpy(collective->block.start + place.offset, input->untyped_data(), place.size);
    }
  }
  auto ticket = results.get<Ticket>(1);
  if (!ticket.has_value()) return ticket.error();
  bool first;
  {
    std::lock_guard<std::mutex> lock(queue().mutex);
    auto& failed = queue().failed;
    if (std::find(failed.begin(), failed.end(), run.run_id) != failed.end()) {
      return ffi::Error(ffi::ErrorCode::kUnknown, "an earlier collective of this run has failed");
    }
    const uint32_t number = ++queue().last_ticket;
    *(*ticket)->typed_data() = number;
    queue().open[number] = collective;
    first = queue().waiting.empty();
    queue().waiting.push_back(std::move(collective));
  }
  if (first) queue().arrived.notify_one();
  return ffi::Error::Success();
}

// A run has failed: what it has started is never taken, so it is kept no longer.
void forget(int64_t run) {
  std::vector<CollectivePointer> forgotten;  // They give back their memory without the mutex.
  std::lock_guard<std::mutex> lock(queue().mutex);
  auto& open = queue().open;
  for (auto each = open.begin(); each != open.end();) {
    if (each->second->run == run) {
      forgotten.push_back(std::move(each->second));
      each = open.erase(each);
    } else {
      ++each;
    }
  }
  queue().failed.push_back(run);
  if (queue().failed.size() > kFailedRuns) queue().failed.pop_front();
}

// Copies the results of collectives that have all ended, and lets the program go on. Without the
// mutex: what comes after the take may run in this thread.
void finish(Gathering* gathering) {
  std::string failure;
  size_t number = 0;
  for (const auto& collective : gathering->collectives) {
    if (failure.empty()) failure = collective->failure;
    for (size_t i = collective->first_result; i < collective->places.size(); ++i, ++number) {
      const Place place = collective->places[i];
      if (collective->failure.empty() && place.size != 0) {
        std::memcpy(gathering->results[number], collective->block.start + place.offset, place.size);
      }
    }
  }
  const int64_t run = gathering->collectives.empty() ? 0 : gathering->collectives.front()->run;
  gathering->collectives.clear();
  if (failure.empty()) {
    gathering->promise.SetAvailable();
  } else {
    forget(run);
    gathering->promise.SetError(ffi::Error(ffi::ErrorCode::kUnknown, failure));
  }
}

// Operands: tickets. Results: those of their collectives, one after the other.
ffi::Future take(ffi::RemainingArgs operands, ffi::RemainingRets results) {
  auto gathering = std::make_shared<Gathering>();
  ffi::Future future(gathering->promise);
  auto refuse = [&](const std::string& why) {
    gathering->promise.SetError(ffi::Error::Internal(why));
    return std::move(future);
  };
  for (size_t i = 0; i < results.size(); ++i) {
    auto result = results.get<ffi::AnyBuffer>(i);
    if (!result.has_value()) return refuse("a result of hvdlite_take is no array");
    gathering->results.push_back(static_cast<char*>((*result)->untyped_data()));
  }
  {
    std::lock_guard<std::mutex> lock(queue().mutex);
    size_t count = 0;
    for (size_t i = 0; i < operands.size(); ++i) {
      auto ticket = operands.get<Ticket>(i);
      auto found = queue().open.end();
      if (ticket.has_value()) found = queue().open.find(*ticket->typed_data());
      if (found == queue().open.end()) return refuse("no collective has this ticket");
      count += found->second->places.size() - found->second->first_result;
      gathering->collectives.push_back(std::move(found->second));
      queue().open.erase(found);
    }
    if (count != results.size()) return refuse("hvdlite_take has other results than its collectives");
    for (const auto& collective : gathering->collectives) {
      if (collective->ended) continue;
      collective->gathering = gathering;
      ++gathering->missing;
    }
    if (gathering->missing != 0) return future;
  }
  finish(gathering.get());
  return future;
}

}  // namespace
}  // namespace hvdlite

XLA_FFI_DEFINE_HANDLER_SYMBOL(hvdlite_start, hvdlite::start,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::RunId>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("call")
                                  .Attr<xla::ffi::Span<const int64_t>>("sizes"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(hvdlite_take, hvdlite::take,
                              xla::ffi::Ffi::Bind().RemainingArgs().RemainingRets());

using hvdlite::CollectivePointer;
using hvdlite::queue;

extern "C" {

// This process has a thread that calls hvdlite_next, from now on.
void hvdlite_serve() { hvdlite::served_in = getpid(); }

// Sleeps until something is in the queue, and takes all of it. For each collective in turn:
//   collective, call, number of addresses, addresses
// The memory is good until the next call.
const int64_t* hvdlite_next(int64_t* length) {
  static auto* taken = new std::vector<CollectivePointer>;
  static auto* record = new std::vector<int64_t>;
  {
    std::unique_lock<std::mutex> lock(queue().mutex);
    queue().arrived.wait(lock, [] { return !queue().waiting.empty(); });
    taken->swap(queue().waiting);
  }
  record->clear();
  for (auto& collective : *taken) {
    record->insert(record->end(),
                   {reinterpret_cast<int64_t>(new CollectivePointer(collective)), collective->call,
                    static_cast<int64_t>(collective->places.size())});
    for (const auto place : collective->places) {
      record->push_back(reinterpret_cast<int64_t>(collective->block.start + place.offset));
    }
  }
  taken->clear();
  *length = static_cast<int64_t>(record->size());
  return record->data();
}

// How many collectives have been started and not taken.
int64_t hvdlite_open() {
  std::lock_guard<std::mutex> lock(queue().mutex);
  return static_cast<int64_t>(queue().open.size());
}

// How many bytes lie in memory that nothing uses.
int64_t hvdlite_unused_bytes() {
  std::lock_guard<std::mutex> lock(queue().mutex);
  return static_cast<int64_t>(queue().unused_bytes);
}

// The programs that have been started are over: what they have not taken, they never will.
void hvdlite_forget() {
  std::unordered_map<uint32_t, CollectivePointer> forgotten;  // They free memory without the mutex.
  std::lock_guard<std::mutex> lock(queue().mutex);
  forgotten.swap(queue().open);
}

// The collective has ended: with all results written, or for the reason that `failure` tells. The
// pointer is no more. A program that waited for it goes on in a thread of its own, for it may run long.
void hvdlite_end(CollectivePointer* pointer, const char* failure) {
  CollectivePointer collective = std::move(*pointer);
  delete pointer;
  std::shared_ptr<hvdlite::Gathering> gathering;
  {
    std::lock_guard<std::mutex> lock(queue().mutex);
    if (failure != nullptr) collective->failure = failure;
    collective->ended = true;
    gathering = std::move(collective->gathering);
    if (gathering == nullptr || --gathering->missing != 0) return;
  }
  std::thread([gathering] { hvdlite::finish(gathering.get()); }).detach();
}

}  // extern "C"
