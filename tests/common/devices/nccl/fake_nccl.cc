// The symbols of NCCL and of the CUDA runtime, on memory of the host: a stream is a thread that
// does work in order, and members are threads of one process that meet once for each collective.
// The functions fake_* let tests delay, hold, fail and observe. Written for hvdlite's tests.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace {

using Work = std::function<void()>;
constexpr int kNotReady = 600, kCapturing = 900, kInvalidValue = 1, kInvalidHandle = 400;
constexpr int kUnhandled = 1, kInvalidArgument = 4, kInvalidUsage = 5, kInProgress = 7;

// Guards all that follows; the condition tells of any change. Nothing is destroyed at the exit of
// the process, when streams may still run.
auto& everything = *new std::mutex;
auto& changed = *new std::condition_variable;
auto& journal = *new std::vector<std::string>;
auto& used_devices = *new std::set<int>;    // that have a context: cudaSetDevice makes one
auto& pinned = *new std::set<void*>;        // memory of the host
auto& allocated = *new std::set<void*>;     // memory of devices
int version = 22703, delay_us = 0, event_error = 0, pending_polls = 0;
int misused = 0;  // calls for streams that were destroyed
thread_local int device = 0, capture_mode = 0, last_error = 0;
std::atomic<int> captures{0};  // in all threads
// A thread that captures, or any while another does unless it has chosen not to be in the way.
bool refused();
thread_local struct Stream* capturing = nullptr;

void note(const std::string& line) { journal.push_back(line); }

struct Stream {
  std::deque<Work> work;
  std::vector<Work>* graph = nullptr;  // Where work goes during a capture.
  int holds = 0;
  bool ended = false;
  std::thread thread{[this] { run(); }};

  void add(Work one) {
    std::lock_guard<std::mutex> lock(everything);
    if (ended) misused++;  // CUDA may do anything.
    if (graph) graph->push_back(std::move(one));
    else work.push_back(std::move(one));
    changed.notify_all();
  }
  void run() {
    for (;;) {
      Work one;
      {
        std::unique_lock<std::mutex> lock(everything);
        changed.wait(lock, [&] { return (!holds && !work.empty()) || (ended && work.empty()); });
        if (work.empty()) return;
        one = std::move(work.front());
      }
      if (delay_us) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
      one();
      std::lock_guard<std::mutex> lock(everything);
      work.pop_front();
      changed.notify_all();
    }
  }
};

Stream* of(Stream* stream) {  // The default stream has no address.
  static Stream* standard = new Stream;
  return stream ? stream : standard;
}

struct Event {
  long recorded = 0, done = 0;
  bool timed = false;
  std::chrono::steady_clock::time_point at;
};

struct Round {
  int arrived = 0;
  std::map<int, std::vector<char>> data;       // By member.
  std::map<std::pair<int, int>, std::vector<char>> messages;  // By sender and receiver.
};

struct Hub {
  int size = 0;
  std::map<long, Round> rounds;
};

auto& hubs = *new std::map<std::string, std::shared_ptr<Hub>>;
auto& failures = *new std::map<long, int>;  // member * 1000 + round -> code of an asynchronous error
auto& refusals = *new std::map<int, int>;   // member -> code that the next collective returns
auto& late = *new std::map<int, int>;       // member -> code that its connection ends with

struct Comm {
  std::shared_ptr<Hub> hub;
  int size, index;
  long round = 0;
  int error = 0;
  bool aborted = false;
  int polls = 0;
  std::map<int, double> scalars;
  int next_op = 5;
};

struct Message {
  bool sends;
  const void* from;
  void* to;
  size_t bytes;
  int peer;
  Comm* comm;
  Stream* stream;
};
thread_local int depth = 0;
thread_local std::vector<Message> group;

size_t size_of(int dtype) {
  static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return sizes[dtype];
}

double half(uint16_t bits) {
  int exponent = (bits >> 10) & 31, fraction = bits & 1023;
  double value = exponent ? __builtin_ldexp(1024 + fraction, exponent - 25)
                          : __builtin_ldexp(fraction, -24);
  return bits & 0x8000 ? -value : value;
}

uint16_t to_half(double value) {  // Exact for what tests use: small integers and halves.
  uint16_t sign = value < 0 ? 0x8000 : 0;
  value = value < 0 ? -value : value;
  if (value == 0) return sign;
  int exponent;
  double fraction = __builtin_frexp(value, &exponent);
  return sign | ((exponent + 14) << 10) | (int(fraction * 2048) - 1024);
}

double bfloat(uint16_t bits) {
  uint32_t wide = uint32_t(bits) << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}

uint16_t to_bfloat(double value) {
  float narrow = float(value);
  uint32_t bits;
  memcpy(&bits, &narrow, 4);
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

template <class T> T combine(T a, T b, int op) {
  if (op == 1) return a * b;
  if (op == 2) return a > b ? a : b;
  if (op == 3) return a < b ? a : b;
  return a + b;
}

template <class T> void fold(char* into, const char* from, size_t count, int op) {
  T* a = reinterpret_cast<T*>(into);
  const T* b = reinterpret_cast<const T*>(from);
  for (size_t i = 0; i < count; i++) a[i] = combine(a[i], b[i], op);
}

template <double (*read)(uint16_t), uint16_t (*write)(double)>
void fold16(char* into, const char* from, size_t count, int op) {
  uint16_t* a = reinterpret_cast<uint16_t*>(into);
  const uint16_t* b = reinterpret_cast<const uint16_t*>(from);
  for (size_t i = 0; i < count; i++) a[i] = write(combine(read(a[i]), read(b[i]), op));
}

void reduce_into(char* into, const char* from, size_t count, int dtype, int op) {
  switch (dtype) {
    case 0: return fold<int8_t>(into, from, count, op);
    case 1: return fold<uint8_t>(into, from, count, op);
    case 2: return fold<int32_t>(into, from, count, op);
    case 3: return fold<uint32_t>(into, from, count, op);
    case 4: return fold<int64_t>(into, from, count, op);
    case 5: return fold<uint64_t>(into, from, count, op);
    case 6: return fold16<half, to_half>(into, from, count, op);
    case 7: return fold<float>(into, from, count, op);
    case 8: return fold<double>(into, from, count, op);
    case 9: return fold16<bfloat, to_bfloat>(into, from, count, op);
  }
}

void multiply(char* data, size_t count, int dtype, double factor) {
  for (size_t i = 0; i < count; i++) {
    if (dtype == 6) { auto p = reinterpret_cast<uint16_t*>(data) + i; *p = to_half(half(*p) * factor); }
    if (dtype == 7) reinterpret_cast<float*>(data)[i] *= float(factor);
    if (dtype == 8) reinterpret_cast<double*>(data)[i] *= factor;
    if (dtype == 9) { auto p = reinterpret_cast<uint16_t*>(data) + i; *p = to_bfloat(bfloat(*p) * factor); }
  }
}

// Meets the other members on the stream's thread; false if this one was aborted.
using Fill = std::function<void(Round&)>;
bool meet(Comm* comm, const std::string& what, const Fill& give, const Fill& take) {
  std::unique_lock<std::mutex> lock(everything);
  long number = ++comm->round;
  if (comm->size > 1) note(what + " " + std::to_string(comm->index));
  auto failure = failures.find(comm->index * 1000 + number);
  if (comm->size > 1 && failure != failures.end()) {
    comm->error = failure->second;
    changed.notify_all();
    changed.wait(lock, [&] { return comm->aborted; });
  }
  if (comm->aborted) return false;
  auto hub = comm->hub;
  Round& round = hub->rounds[number];
  give(round);
  round.arrived++;
  changed.notify_all();
  changed.wait(lock, [&] { return comm->aborted || round.arrived == comm->size; });
  if (comm->aborted) return false;
  take(round);
  if (comm->size > 1) note(what + " done " + std::to_string(comm->index));
  return true;
}

int check(Comm* comm, int dtype, int op) {
  if (!comm || comm->aborted || dtype < 0 || dtype > 9) return kInvalidArgument;
  if (op > 4 && !comm->scalars.count(op)) return kInvalidArgument;
  auto refusal = refusals.find(comm->index);
  if (comm->size > 1 && refusal != refusals.end()) {
    int code = refusal->second;
    refusals.erase(refusal);
    return code;
  }
  return 0;
}

// Reduces everything that members gave; `take` gets the total.
int reduction(const char* what, const void* from, size_t count, int dtype, int op, Comm* comm,
              Stream* stream, std::function<void(std::vector<char>&)> take) {
  std::unique_lock<std::mutex> lock(everything);
  if (int code = check(comm, dtype, op)) return code;
  double factor = op > 4 ? comm->scalars[op] : 1;
  lock.unlock();
  size_t bytes = count * size_of(dtype);
  stream->add([=] {
    meet(comm, what,
         [&](Round& round) {
           auto& data = round.data[comm->index];
           data.assign((const char*)from, (const char*)from + bytes);
           if (factor != 1) multiply(data.data(), count, dtype, factor);
         },
         [&](Round& round) {
           std::vector<char> total = round.data[0];
           for (int i = 1; i < comm->size; i++)
             reduce_into(total.data(), round.data[i].data(), count, dtype, op);
           take(total);
         });
  });
  return 0;
}

void send_messages() {
  std::map<std::pair<Comm*, Stream*>, std::vector<Message>> by_comm;
  for (auto& one : group) by_comm[{one.comm, one.stream}].push_back(one);
  group.clear();
  for (auto& entry : by_comm) {
    Comm* comm = entry.first.first;
    auto messages = entry.second;
    entry.first.second->add([=] {
      meet(comm, "alltoall",
           [&](Round& round) {
             for (auto& one : messages)
               if (one.sends)
                 round.messages[{comm->index, one.peer}].assign(
                     (const char*)one.from, (const char*)one.from + one.bytes);
           },
           [&](Round& round) {
             for (auto& one : messages)
               if (!one.sends) memcpy(one.to, round.messages[{one.peer, comm->index}].data(), one.bytes);
           });
    });
  }
}

bool refused() { return capturing || (captures && capture_mode == 0); }

}  // namespace

extern "C" {

// ---- what tests control ----
void fake_reset() {
  std::lock_guard<std::mutex> lock(everything);
  journal.clear(); failures.clear(); refusals.clear(); late.clear(); misused = 0;
  version = 22703; delay_us = 0; event_error = 0; pending_polls = 0;
}
void fake_version(int value) { version = value; }
void fake_delay(int microseconds) { delay_us = microseconds; }
void fake_event_error(int code) { event_error = code; }
void fake_polls(int count) { pending_polls = count; }
int fake_pinned(void* memory) { std::lock_guard<std::mutex> lock(everything); return int(pinned.count(memory)); }
// The thread has chosen a device, as a new one has the first, and nobody uses that.
void fake_choose(int number) {
  std::lock_guard<std::mutex> lock(everything);
  device = number;
  used_devices.erase(number);
}
int fake_uses(int number) { std::lock_guard<std::mutex> lock(everything); return int(used_devices.count(number)); }
int fake_misused() { std::lock_guard<std::mutex> lock(everything); return misused; }
int fake_depth() { return depth; }
int fake_allocated(void* memory) { std::lock_guard<std::mutex> lock(everything); return int(allocated.count(memory)); }
void fake_fail(int member, int round, int code) {
  std::lock_guard<std::mutex> lock(everything);
  failures[member * 1000 + round] = code;
}
void fake_refuse(int member, int code) { std::lock_guard<std::mutex> lock(everything); refusals[member] = code; }
void fake_late(int member, int code) { std::lock_guard<std::mutex> lock(everything); late[member] = code; }
void fake_hold(Stream* stream) { std::lock_guard<std::mutex> lock(everything); stream->holds++; }
void fake_release(Stream* stream) {
  std::lock_guard<std::mutex> lock(everything);
  stream->holds--;
  changed.notify_all();
}
int fake_journal(char* into, int room) {
  std::lock_guard<std::mutex> lock(everything);
  std::string all;
  for (auto& line : journal) all += line + "\n";
  strncpy(into, all.c_str(), room);
  return int(all.size());
}

// ---- the CUDA runtime ----
const char* cudaGetErrorString(int code) {
  return code == 700 ? "an illegal memory access was encountered" : code == kCapturing ? "operation not permitted when stream is capturing" : "a fake error";
}
int cudaRuntimeGetVersion(int* value) { *value = 12080; return 0; }
int cudaGetDeviceCount(int* count) { *count = 8; return 0; }
int cudaGetDevice(int* number) { *number = device; return 0; }
int cudaSetDevice(int number) {
  if (number < 0 || number > 7) return 101;
  std::lock_guard<std::mutex> lock(everything);
  device = number;
  used_devices.insert(number);
  return 0;
}
int cudaGetLastError() { int code = last_error; last_error = 0; return code; }
int cudaThreadExchangeStreamCaptureMode(int* mode) { std::swap(*mode, capture_mode); return 0; }
int cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  std::lock_guard<std::mutex> lock(everything);
  pinned.insert(*memory = malloc(bytes));
  return 0;
}
int cudaFreeHost(void* memory) {
  std::lock_guard<std::mutex> lock(everything);
  if (!pinned.erase(memory)) return kInvalidValue;
  free(memory);
  return 0;
}
// The driver's; "used" has a context.
int cuDevicePrimaryCtxGetState(int number, unsigned*, int* active) {
  std::lock_guard<std::mutex> lock(everything);
  *active = used_devices.count(number);
  return 0;
}
int cudaDeviceGetPCIBusId(char* into, int room, int number) {
  strncpy(into, ("0000:0" + std::to_string(number) + ":00.0").c_str(), room);
  return 0;
}
int cudaStreamCreateWithFlags(Stream** stream, unsigned) { *stream = new Stream; return 0; }
int cudaStreamDestroy(Stream* stream) {
  { std::lock_guard<std::mutex> lock(everything); stream->ended = true; changed.notify_all(); }
  stream->thread.detach();  // As CUDA does: the work that is queued is done, and nobody waits.
  return 0;
}
int cudaStreamSynchronize(Stream* stream) {
  if (capturing) return kCapturing;
  std::unique_lock<std::mutex> lock(everything);
  changed.wait(lock, [&] { return stream->work.empty(); });
  return 0;
}
int cudaEventCreateWithFlags(Event** event, unsigned flags) {
  if (capturing) return kCapturing;
  *event = new Event;
  (*event)->timed = !(flags & 2);
  return 0;
}
int cudaEventElapsedTime(float* milliseconds, Event* earlier, Event* later) {
  std::lock_guard<std::mutex> lock(everything);
  if (!earlier->timed || !later->timed) return kInvalidHandle;
  *milliseconds = std::chrono::duration<float, std::milli>(later->at - earlier->at).count();
  return 0;
}
int cudaEventDestroy(Event*) { return 0; }  // Leaked: streams may still refer to it.
int cudaEventRecord(Event* event, Stream* stream) {
  long number;
  { std::lock_guard<std::mutex> lock(everything); number = ++event->recorded; }
  of(stream)->add([=] { std::lock_guard<std::mutex> lock(everything); event->done = number; event->at = std::chrono::steady_clock::now(); changed.notify_all(); });
  return 0;
}
int cudaStreamWaitEvent(Stream* stream, Event* event, unsigned) {
  long number;
  { std::lock_guard<std::mutex> lock(everything); number = event->recorded; }
  of(stream)->add([=] { std::unique_lock<std::mutex> lock(everything); changed.wait(lock, [&] { return event->done >= number; }); });
  return 0;
}
int cudaEventQuery(Event* event) {
  if (refused()) return last_error = kCapturing;
  std::lock_guard<std::mutex> lock(everything);
  if (event_error) return last_error = event_error;
  return event->done >= event->recorded ? 0 : last_error = kNotReady;
}
int cudaEventSynchronize(Event* event) {
  if (capturing) return kCapturing;
  std::unique_lock<std::mutex> lock(everything);
  changed.wait(lock, [&] { return event->done >= event->recorded; });
  return event_error;
}
int cudaMallocAsync(void** memory, size_t bytes, Stream*) {
  if (capturing) return kCapturing;
  *memory = malloc(bytes ? bytes : 1);
  memset(*memory, 0x55, bytes);  // Nobody may rely on zeros.
  std::lock_guard<std::mutex> lock(everything);
  allocated.insert(*memory);
  return 0;
}
int cudaFreeAsync(void* memory, Stream* stream) {
  of(stream)->add([=] { std::lock_guard<std::mutex> lock(everything); allocated.erase(memory); free(memory); });
  return 0;
}
int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int kind, Stream* stream) {
  if (kind == 1) {  // From the host: pageable memory is read before this returns.
    auto copy = std::make_shared<std::vector<char>>((const char*)from, (const char*)from + bytes);
    stream->add([=] { memcpy(to, copy->data(), bytes); });
  } else {
    stream->add([=] { memmove(to, from, bytes); });
  }
  return 0;
}
int cudaMemsetAsync(void* memory, int value, size_t bytes, Stream* stream) {
  of(stream)->add([=] { memset(memory, value, bytes); });
  return 0;
}
int cudaPointerGetAttributes(int* attributes, const void*) {
  attributes[0] = 2, attributes[1] = device;
  return 0;
}
int cudaStreamBeginCapture(Stream* stream, int) {
  std::lock_guard<std::mutex> lock(everything);
  stream->graph = new std::vector<Work>;
  capturing = stream;
  captures++;
  return 0;
}
int cudaStreamEndCapture(Stream* stream, std::vector<Work>** graph) {
  std::lock_guard<std::mutex> lock(everything);
  *graph = stream->graph;
  stream->graph = nullptr;
  capturing = nullptr;
  captures--;
  return 0;
}
int cudaGraphLaunch(std::vector<Work>* graph, Stream* stream) {
  for (auto& one : *graph) stream->add(one);
  return 0;
}

// ---- NCCL ----
struct ncclUniqueId { char bytes[128]; };
struct Config { size_t size; unsigned magic, version; int blocking; };

int ncclGetVersion(int* value) { *value = version; return 0; }
const char* ncclGetErrorString(int code) {
  static const char* texts[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error",
                                "invalid argument", "invalid usage", "remote process exited or there was a network error", "NCCL operation in progress"};
  return code >= 0 && code < 8 ? texts[code] : "unknown result code";
}
const char* ncclGetLastError(Comm*) { return "the fake says more"; }
int ncclGetUniqueId(ncclUniqueId* id) {
  static int counter = 0;
  std::lock_guard<std::mutex> lock(everything);
  memset(id->bytes, 0, 128);
  std::string text = "fake " + std::to_string(++counter);
  memcpy(id->bytes + 64, text.c_str(), text.size());  // Behind zeros: all 128 bytes must travel.
  return 0;
}
int ncclCommInitRank(Comm** comm, int size, ncclUniqueId id, int index) {
  std::unique_lock<std::mutex> lock(everything);
  auto& hub = hubs[std::string(id.bytes, 128)];
  if (!hub) hub = std::make_shared<Hub>();
  hub->size++;
  *comm = new Comm{hub, size, index};
  note("connect " + std::to_string(index) + " of " + std::to_string(size) + " device " + std::to_string(device));
  changed.notify_all();
  auto kept = hub;
  changed.wait(lock, [&] { return kept->size >= size; });
  return 0;
}
#ifndef OLD
int ncclCommInitRankConfig(Comm** comm, int size, ncclUniqueId id, int index, Config* config) {
  if (config->magic != 0xcafebeef || config->size < sizeof(Config) || config->blocking != 0) return kInvalidArgument;
  std::unique_lock<std::mutex> lock(everything);
  auto& hub = hubs[std::string(id.bytes, 128)];
  if (!hub) hub = std::make_shared<Hub>();
  hub->size++;
  *comm = new Comm{hub, size, index};
  (*comm)->polls = pending_polls;
  note("connect " + std::to_string(index) + " of " + std::to_string(size) + " device " + std::to_string(device));
  changed.notify_all();
  return kInProgress;
}
#endif
int ncclCommGetAsyncError(Comm* comm, int* code) {
  std::lock_guard<std::mutex> lock(everything);
  *code = comm->error;
  if (comm->size > 1 && late.count(comm->index)) *code = late[comm->index];
  else if (comm->hub->size < comm->size || comm->polls-- > 0) *code = kInProgress;
  return 0;
}
int ncclCommFinalize(Comm* comm) { std::lock_guard<std::mutex> lock(everything); note("finalize " + std::to_string(comm->index)); return kInProgress; }
int ncclCommDestroy(Comm* comm) { std::lock_guard<std::mutex> lock(everything); note("destroy " + std::to_string(comm->index)); return 0; }
int ncclCommAbort(Comm* comm) {
  std::lock_guard<std::mutex> lock(everything);
  comm->aborted = true;
  note("abort " + std::to_string(comm->index));
  changed.notify_all();
  return 0;
}
int ncclAllReduce(const void* from, void* to, size_t count, int dtype, int op, Comm* comm, Stream* stream) {
  return reduction("allreduce", from, count, dtype, op, comm, stream,
                   [=](std::vector<char>& total) { memcpy(to, total.data(), total.size()); });
}
int ncclReduce(const void* from, void* to, size_t count, int dtype, int op, int root, Comm* comm, Stream* stream) {
  return reduction("reduce", from, count, dtype, op, comm, stream, [=](std::vector<char>& total) {
    if (comm->index == root) memcpy(to, total.data(), total.size());
  });
}
int ncclReduceScatter(const void* from, void* to, size_t count, int dtype, int op, Comm* comm, Stream* stream) {
  size_t bytes = count * size_of(dtype);
  return reduction("reducescatter", from, count * comm->size, dtype, op, comm, stream,
                   [=](std::vector<char>& total) { memcpy(to, total.data() + bytes * comm->index, bytes); });
}
int ncclBroadcast(const void* from, void* to, size_t count, int dtype, int root, Comm* comm, Stream* stream) {
  { std::lock_guard<std::mutex> lock(everything); if (int code = check(comm, dtype, 0)) return code; }
  size_t bytes = count * size_of(dtype);
  stream->add([=] {
    meet(comm, "broadcast",
         [&](Round& round) { if (comm->index == root) round.data[root].assign((const char*)from, (const char*)from + bytes); },
         [&](Round& round) { memcpy(to, round.data[root].data(), bytes); });
  });
  return 0;
}
int ncclAllGather(const void* from, void* to, size_t count, int dtype, Comm* comm, Stream* stream) {
  { std::lock_guard<std::mutex> lock(everything); if (int code = check(comm, dtype, 0)) return code; }
  size_t bytes = count * size_of(dtype);
  stream->add([=] {
    meet(comm, "allgather",
         [&](Round& round) { round.data[comm->index].assign((const char*)from, (const char*)from + bytes); },
         [&](Round& round) { for (int i = 0; i < comm->size; i++) memcpy((char*)to + i * bytes, round.data[i].data(), bytes); });
  });
  return 0;
}
int ncclGroupStart() { depth++; return 0; }
int ncclGroupEnd() { if (--depth == 0) send_messages(); return 0; }
int ncclSend(const void* from, size_t count, int dtype, int peer, Comm* comm, Stream* stream) {
  std::lock_guard<std::mutex> lock(everything);
  if (int code = check(comm, dtype, 0)) return code;
  if (!depth) return kInvalidUsage;
  group.push_back({true, from, nullptr, count * size_of(dtype), peer, comm, stream});
  return 0;
}
int ncclRecv(void* to, size_t count, int dtype, int peer, Comm* comm, Stream* stream) {
  std::lock_guard<std::mutex> lock(everything);
  if (!depth) return kInvalidUsage;
  group.push_back({false, nullptr, to, count * size_of(dtype), peer, comm, stream});
  return 0;
}
int ncclRedOpCreatePreMulSum(int* op, void* scalar, int dtype, int residence, Comm* comm) {
  if (residence != 1) return kInvalidArgument;
  std::lock_guard<std::mutex> lock(everything);
  double value = 0;
  if (dtype == 6) value = half(*(uint16_t*)scalar);
  if (dtype == 7) value = *(float*)scalar;
  if (dtype == 8) value = *(double*)scalar;
  if (dtype == 9) value = bfloat(*(uint16_t*)scalar);
  *op = comm->next_op++;
  comm->scalars[*op] = value;
  return 0;
}
int ncclRedOpDestroy(int op, Comm* comm) { std::lock_guard<std::mutex> lock(everything); comm->scalars.erase(op); return 0; }

}  // extern "C"
