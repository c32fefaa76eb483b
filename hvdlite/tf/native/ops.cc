// Two TensorFlow operations with which a graph runs collectives without calling Python.
//
//   HvdliteStart ... HvdliteStart    puts a collective into a queue; never waits, takes no GIL
//            \   /
//         HvdliteTake                ends, with the outputs of all, when the last of them has ended;
//                                    no thread waits for that
//
// One thread of Python's empties the queue (hvdlite_next), starts the collectives in the engine, and
// tells how each has ended (hvdlite_end). graph_ops.py is the other side of the C functions below.

#include <unistd.h>

#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/variant.h"
#include "tensorflow/core/framework/variant_tensor_data.h"

// Kernels for GPUs need the stream of TensorFlow's, and no header of CUDA.
#if __has_include("xla/stream_executor/stream.h")
#include "xla/stream_executor/stream.h"
#define TENSORFLOW_HAS_STREAMS 1
#endif

namespace hvdlite {
namespace {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;

struct Gathering;

// Functions of the CUDA runtime that Python has loaded, by their addresses; see hvdlite_use_events.
struct Events {
  int (*create)(void**, unsigned) = nullptr;
  int (*record)(void*, void*) = nullptr;
  int (*destroy)(void*) = nullptr;
  void* stream_of_host = nullptr;  // stands for the stream of tensors on the CPU, in tests
};

Events& events() {
  static Events* instance = new Events;
  return *instance;
}

// One collective on its way. The graph holds it by a ticket, Python by a pointer to a shared_ptr: its
// tensors outlive a step that is cancelled while the engine reads and writes them.
struct Collective {
  int64_t call = 0;
  int in_place = 0;  // so many outputs are there from the start
  bool filled = false;  // the outputs have the values of the inputs, which are not kept
  tensorflow::DataTypeVector output_types;
  std::vector<Tensor> inputs;
  std::vector<Tensor> outputs;
  void* stream = nullptr;  // of the device that computes the inputs; null where that is the host
  tensorflow::Allocator* allocator = nullptr;  // of its memory
  void* ready = nullptr;   // the event on it behind all that writes or reads this memory
  // All below is guarded by the queue's mutex.
  bool ended = false;
  absl::Status status;
  std::shared_ptr<Gathering> gathering;  // waits for this collective

  ~Collective() {
    if (ready != nullptr) events().destroy(ready);
  }
};

using CollectivePointer = std::shared_ptr<Collective>;

// One execution of HvdliteTake.
struct Gathering {
  OpKernelContext* context = nullptr;  // valid until `done` was called
  tensorflow::AsyncOpKernel::DoneCallback done;
  std::vector<CollectivePointer> collectives;
  tensorflow::CancellationToken token = tensorflow::CancellationManager::kInvalidToken;
  bool cancellable = false;
  size_t missing = 0;    // collectives that have not ended; guarded by the queue's mutex
  bool claimed = false;  // by whoever calls `done`; guarded likewise
};

// What both sides share. Never destroyed: threads may still wait for it when the process ends.
struct Queue {
  std::mutex mutex;
  std::condition_variable arrived;
  std::vector<CollectivePointer> waiting;
  pid_t served_in = -1;  // the process that has the thread of Python's; a forked child has none
};

Queue& queue() {
  static Queue* instance = new Queue;
  return *instance;
}

// What a graph passes from HvdliteStart to HvdliteTake.
struct Ticket {
  CollectivePointer collective;
  std::string TypeName() const { return "hvdlite::Ticket"; }
  std::string DebugString() const { return TypeName(); }
  void Encode(tensorflow::VariantTensorData*) const {}
  bool Decode(const tensorflow::VariantTensorData&) { return false; }  // it stays in its process
};

void* data(const Tensor& tensor) { return const_cast<char*>(tensor.tensor_data().data()); }

// Gives the output the values of an input of the same size, unless it has the input's memory.
void fill(Tensor* output, const Tensor& input) {
  const auto values = input.tensor_data();
  if (data(*output) != values.data()) std::memcpy(data(*output), values.data(), values.size());
}

#ifdef TENSORFLOW_HAS_STREAMS
// Returns the address of the device's stream; null where this TensorFlow does not tell it.
template <class Stream>
auto address_of(Stream* stream, int) -> decltype(stream->platform_specific_handle().stream) {
  return stream->platform_specific_handle().stream;
}
template <class Stream>
void* address_of(Stream*, long) { return nullptr; }

void* stream_of(OpKernelContext* context) {
  auto* device = context->op_device_context();
  if (device == nullptr || device->stream() == nullptr) return events().stream_of_host;
  return address_of(device->stream(), 0);
}
#else
void* stream_of(OpKernelContext*) { return events().stream_of_host; }
#endif

constexpr unsigned kBlockingEventWithoutTime = 3;

// Marks the place in the stream of the device behind which the tensors of a collective are ready.
absl::Status mark(OpKernelContext* context, Collective* collective) {
  if (events().create == nullptr) {
    return absl::FailedPreconditionError(
        "a collective on a GPU was made for a job that reduces there, and this one does not: "
        "make the graph after hvd.init(), or set HVDLITE_DEVICES=off");
  }
  collective->stream = stream_of(context);
  collective->allocator = context->device()->GetAllocator(tensorflow::AllocatorAttributes());
  if (collective->stream == nullptr) {
    return absl::UnimplementedError(
        "this TensorFlow does not tell the stream of a GPU: set HVDLITE_DEVICES=off");
  }
  int code = events().create(&collective->ready, kBlockingEventWithoutTime);
  if (code == 0) code = events().record(collective->ready, collective->stream);
  if (code == 0) return absl::OkStatus();
  return absl::UnknownError("an event of the GPU was not recorded: CUDA error " + std::to_string(code));
}

class Start : public tensorflow::OpKernel {
 public:
  explicit Start(tensorflow::OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("call", &call_));
    OP_REQUIRES_OK(construction, construction->GetAttr("in_place", &in_place_));
    OP_REQUIRES_OK(construction, construction->GetAttr("filled", &filled_));
    OP_REQUIRES_OK(construction, construction->GetAttr("on_device", &on_device_));
    on_device_ |= construction->device_type() == tensorflow::DeviceType(tensorflow::DEVICE_GPU);
    filled_ &= !on_device_;  // the stream of the collective copies
    OP_REQUIRES_OK(construction, construction->GetAttr("output_types", &output_types_));
  }

  void Compute(OpKernelContext* context) override {
    auto collective = std::make_shared<Collective>();
    collective->call = call_;
    collective->in_place = in_place_;
    collective->filled = filled_;
    collective->output_types = output_types_;
    collective->outputs.resize(output_types_.size());
    // An input that nobody else will read becomes the output: no memory has to be found and touched.
    // This comes first, for a reference of our own would be a reader.
    for (int i = 0; i < in_place_; ++i) {
      OP_REQUIRES_OK(context, context->forward_input_or_allocate_temp(
                                  {i}, output_types_[i], context->input(i).shape(),
                                  &collective->outputs[i]));
    }
    for (int i = 0; i < context->num_inputs(); ++i) {
      if (filled_) {
        fill(&collective->outputs[i], context->input(i));
      } else {
        collective->inputs.push_back(context->input(i));
      }
    }
    if (on_device_) OP_REQUIRES_OK(context, mark(context, collective.get()));
    Tensor* ticket = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &ticket));
    ticket->scalar<tensorflow::Variant>()() = Ticket{collective};
    bool first, served;
    {
      std::lock_guard<std::mutex> lock(queue().mutex);
      served = queue().served_in == getpid();
      first = queue().waiting.empty();
      if (served) queue().waiting.push_back(std::move(collective));
    }
    OP_REQUIRES(context, served,
                absl::UnknownError("this process was forked from a rank and is no rank itself: "
                                   "run collectives in the parent, or start it with spawn"));
    if (first) queue().arrived.notify_one();
  }

 private:
  int64_t call_;
  int in_place_;
  bool filled_;
  bool on_device_;
  tensorflow::DataTypeVector output_types_;
};

// Sets the outputs, or the first error, and ends the execution. Without the mutex.
void finish(const std::shared_ptr<Gathering>& gathering) {
  OpKernelContext* context = gathering->context;
  if (gathering->cancellable) {
    context->cancellation_manager()->DeregisterCallback(gathering->token);
  }
  for (const auto& collective : gathering->collectives) context->SetStatus(collective->status);
  if (context->status().ok()) {
    int number = 0;
    for (const auto& collective : gathering->collectives) {
      for (auto& output : collective->outputs) context->set_output(number++, std::move(output));
    }
  }
  gathering->collectives.clear();
  auto done = std::move(gathering->done);
  done();
}

class Take : public tensorflow::AsyncOpKernel {
 public:
  explicit Take(tensorflow::OpKernelConstruction* construction) : AsyncOpKernel(construction) {}

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    auto gathering = std::make_shared<Gathering>();
    for (int i = 0; i < context->num_inputs(); ++i) {
      const auto* ticket = context->input(i).scalar<tensorflow::Variant>()().get<Ticket>();
      OP_REQUIRES_ASYNC(context, ticket != nullptr, absl::InternalError("no ticket"), done);
      gathering->collectives.push_back(ticket->collective);
    }
    gathering->context = context;
    gathering->done = std::move(done);
    if (await(gathering)) finish(gathering);
  }

 private:
  // Whether all collectives have ended already. Otherwise the last of them will end the execution, or the
  // cancellation of the step: whichever claims it.
  static bool await(const std::shared_ptr<Gathering>& gathering) {
    auto* cancellation = gathering->context->cancellation_manager();
    std::unique_lock<std::mutex> lock(queue().mutex);
    for (const auto& collective : gathering->collectives) {
      if (!collective->ended) {
        collective->gathering = gathering;
        ++gathering->missing;
      }
    }
    if (gathering->missing == 0) return true;
    if (cancellation == nullptr) return false;
    gathering->token = cancellation->get_cancellation_token();
    // Flights end under the mutex, so none can end the execution before this has registered.
    gathering->cancellable = true;
    std::weak_ptr<Gathering> weak = gathering;
    if (cancellation->RegisterCallback(gathering->token, [weak] { cancel(weak.lock()); })) {
      return false;
    }
    gathering->cancellable = false;
    lock.unlock();
    cancel(gathering);
    return false;
  }

  static void cancel(const std::shared_ptr<Gathering>& gathering) {
    if (gathering == nullptr) return;
    {
      std::lock_guard<std::mutex> lock(queue().mutex);
      if (gathering->claimed) return;
      gathering->claimed = true;
      for (const auto& collective : gathering->collectives) collective->gathering = nullptr;
    }
    gathering->context->SetStatus(absl::CancelledError("the step was cancelled"));
    auto done = std::move(gathering->done);
    done();
  }
};

REGISTER_OP("HvdliteStart")
    .Input("inputs: input_types")
    .Output("ticket: variant")
    .Attr("call: int")      // the number of the collective in Python's table
    .Attr("in_place: int")  // so many inputs have an output of the same dtype and shape
    .Attr("filled: bool = false")  // all inputs have one, and it has the values of the input
    .Attr("on_device: bool = false")  // the tensors are on a GPU, whose library runs the collective
    .Attr("input_types: list(type) >= 0")
    .Attr("output_types: list(type) >= 1")
    .SetIsStateful()  // two with the same inputs are two collectives
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

REGISTER_OP("HvdliteTake")
    .Input("tickets: count * variant")
    .Output("outputs: output_types")
    .Attr("count: int >= 1")
    .Attr("output_types: list(type) >= 1")
    .SetIsStateful()  // it waits, also where nobody needs an output
    .SetShapeFn(tensorflow::shape_inference::UnknownShape);

REGISTER_KERNEL_BUILDER(Name("HvdliteStart").Device(tensorflow::DEVICE_CPU), Start);
REGISTER_KERNEL_BUILDER(Name("HvdliteTake").Device(tensorflow::DEVICE_CPU), Take);
#ifdef TENSORFLOW_HAS_STREAMS
REGISTER_KERNEL_BUILDER(
    Name("HvdliteStart").Device(tensorflow::DEVICE_GPU).HostMemory("ticket"), Start);
REGISTER_KERNEL_BUILDER(
    Name("HvdliteTake").Device(tensorflow::DEVICE_GPU).HostMemory("tickets"), Take);
#endif

int64_t number_of(const void* pointer) { return reinterpret_cast<int64_t>(pointer); }

void append_shape(std::vector<int64_t>* record, const Tensor& tensor) {
  record->push_back(tensor.dims());
  for (int i = 0; i < tensor.dims(); ++i) record->push_back(tensor.dim_size(i));
}

}  // namespace
}  // namespace hvdlite

using hvdlite::Collective;
using hvdlite::CollectivePointer;
using hvdlite::queue;

extern "C" {

// This process has a thread that calls hvdlite_next, from now on.
void hvdlite_serve() {
  std::lock_guard<std::mutex> lock(queue().mutex);
  queue().served_in = getpid();
}

// Collectives of graphs use these functions of the CUDA runtime, before the first of them is made.
// `stream_of_host` is null outside of tests.
void hvdlite_use_events(int (*create)(void**, unsigned), int (*record)(void*, void*),
                        int (*destroy)(void*), void* stream_of_host) {
  hvdlite::events() = {create, record, destroy, stream_of_host};
}

// Sleeps until something is in the queue, and takes all of it. For each collective in turn:
//   collective, call, number of inputs, number of targets, stream, event: null on the host,
//   for each input: address, number of dimensions, dimensions; for each target: address
// A collective whose targets are filled has no inputs here, but
//   length of what follows, for each target: number of dimensions, dimensions; for each target: address
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
    record->insert(record->end(), {hvdlite::number_of(new CollectivePointer(collective)), collective->call,
                                   static_cast<int64_t>(collective->inputs.size()), collective->in_place,
                                   hvdlite::number_of(collective->stream), hvdlite::number_of(collective->ready)});
    for (const auto& input : collective->inputs) {
      record->push_back(hvdlite::number_of(hvdlite::data(input)));
      hvdlite::append_shape(record, input);
    }
    if (collective->filled) {
      const size_t place = record->size();
      record->push_back(0);
      for (const auto& output : collective->outputs) hvdlite::append_shape(record, output);
      (*record)[place] = static_cast<int64_t>(record->size() - place - 1);
    }
    for (int i = 0; i < collective->in_place; ++i) {
      record->push_back(hvdlite::number_of(hvdlite::data(collective->outputs[i])));
    }
  }
  taken->clear();
  *length = static_cast<int64_t>(record->size());
  return record->data();
}

// Makes the tensor for an output of this shape; its address, or null where there is no memory. That of a
// device belongs to the device's stream: only work on this stream may write it.
void* hvdlite_allocate(CollectivePointer* pointer, int output, int rank, const int64_t* dims) {
  Collective& collective = **pointer;
  tensorflow::TensorShape shape;
  for (int i = 0; i < rank; ++i) shape.AddDim(dims[i]);
  const auto type = collective.output_types[output];
  tensorflow::Tensor tensor = collective.allocator == nullptr
                                  ? tensorflow::Tensor(type, shape)
                                  : tensorflow::Tensor(collective.allocator, type, shape);
  if (!tensor.IsInitialized()) return nullptr;
  collective.outputs[output] = tensor;
  return hvdlite::data(tensor);
}

// The collective has ended: with all outputs written where `code` is 0, else with an absl::StatusCode
// and a message. The pointer is no more. Returns null, or what must be given to hvdlite_finish.
void* hvdlite_end(CollectivePointer* pointer, int code, const char* message) {
  CollectivePointer collective = std::move(*pointer);
  delete pointer;
  collective->inputs.clear();
  std::shared_ptr<hvdlite::Gathering> gathering;
  std::lock_guard<std::mutex> lock(queue().mutex);
  if (code != 0) collective->status = absl::Status(static_cast<absl::StatusCode>(code), message);
  collective->ended = true;
  gathering = std::move(collective->gathering);
  if (gathering == nullptr || --gathering->missing != 0 || gathering->claimed) return nullptr;
  gathering->claimed = true;
  return new std::shared_ptr<hvdlite::Gathering>(std::move(gathering));
}

// Ends an execution of HvdliteTake, which may run what comes after it.
void hvdlite_finish(std::shared_ptr<hvdlite::Gathering>* gathering) {
  hvdlite::finish(*gathering);
  delete gathering;
}

}  // extern "C"
