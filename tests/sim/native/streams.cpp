// Streams, events and the queue of copies.
#include "sim.h"

#include <thread>

extern "C" {
int PyGILState_Check();
void* PyEval_SaveThread();
void PyEval_RestoreThread(void*);
}

namespace sim {

State& state() {
  static State* instance = new State();  // never destroyed: tensors outlive static destructors
  return *instance;
}

Locked::Locked() {
  // Inside the lock a tensor's count may rise, and torch takes the GIL for that when Python knows the tensor: whoever has the GIL
  // must therefore let go of it while it waits for the lock.
  while (!state().mutex.try_lock()) {
    if (!PyGILState_Check()) {
      state().mutex.lock();
      break;
    }
    void* thread = PyEval_SaveThread();
    std::this_thread::yield();
    PyEval_RestoreThread(thread);
  }
  ++state().depth;
}

Locked::~Locked() {
  State& s = state();
  std::vector<c10::Storage> garbage;
  if (--s.depth == 0) garbage.swap(s.garbage);
  s.mutex.unlock();
}

void Clock::join(const Clock& other) {
  for (int i = 0; i < kStreams; ++i) at[i] = std::max(at[i], other.at[i]);
}

namespace {

thread_local int t_device = 0;
thread_local std::array<int, kDevices> t_stream{0, 0};  // index within the device, 0 is the default stream

void check_device(int device) {
  TORCH_CHECK(device >= 0 && device < kDevices, "invalid device ordinal npu:", device);
}

// Runs the front of a queue. Its own needs come first; they lie strictly earlier in host order, so this terminates.
void run_front(int stream) {
  State& s = state();
  Command command = std::move(s.streams[stream].queue.front());
  s.streams[stream].queue.pop_front();
  satisfy(command.needs);
  command.run();
  release_pending(command.src_block);
  release_pending(command.dst_block);
  for (auto& storage : command.keep) s.garbage.push_back(std::move(storage));
}

}  // namespace

int current_device() { return t_device; }

int exchange_device(int device) {
  check_device(device);
  return std::exchange(t_device, device);
}

int stream_index(const c10::Stream& stream) {
  check_device(stream.device_index());
  TORCH_CHECK(stream.id() >= 0 && stream.id() < kPerDevice, "unknown stream id ", stream.id());
  return stream.device_index() * kPerDevice + static_cast<int>(stream.id());
}

int current_stream_index(int device) { return device * kPerDevice + t_stream[device]; }

std::string stream_name(int stream) {
  return "npu:" + std::to_string(stream / kPerDevice) + "/stream " + std::to_string(stream % kPerDevice);
}

// Runs every queued copy that the clock names.
void satisfy(const Clock& clock) {
  for (int i = 0; i < kStreams; ++i) {
    auto& queue = state().streams[i].queue;
    while (!queue.empty() && queue.front().seq <= clock.at[i]) run_front(i);
  }
}

// The next operation of a stream: it is ordered after the stream's past and after all that the host waited for.
uint64_t begin_op(int stream) {
  StreamState& st = state().streams[stream];
  st.clock.join(state().host);
  satisfy(st.clock);
  st.clock.at[stream] = ++st.seq;
  return st.seq;
}

void host_waits_for(const Clock& clock) {
  satisfy(clock);
  state().host.join(clock);
}

void enqueue(int stream, Command command) {
  State& s = state();
  StreamState& st = s.streams[stream];
  st.clock.join(s.host);
  command.needs = st.clock;
  st.clock.at[stream] = command.seq = ++st.seq;
  touch(command.src, command.src_block->kind == Kind::Device, stream, command.seq, false, "copy");
  touch(command.dst, command.dst_block->kind == Kind::Device, stream, command.seq, true, "copy");
  // A reader that does not wait may see anything until the copy has run. It sees poison, unless an earlier queued copy
  // still has business with these bytes.
  if (!any_pending_overlap(command.dst)) command.poison();
  ++command.src_block->pending;
  ++command.dst_block->pending;
  ++s.count.queued;
  st.queue.push_back(std::move(command));
}

bool any_pending_overlap(const Span& span) {
  for (auto& stream : state().streams)
    for (auto& command : stream.queue)
      if (command.src.overlaps(span) || command.dst.overlaps(span)) return true;
  return false;
}

namespace {

bool anything_queued(const Clock& clock) {
  for (int i = 0; i < kStreams; ++i) {
    auto& queue = state().streams[i].queue;
    if (!queue.empty() && queue.front().seq <= clock.at[i]) return true;
  }
  return false;
}

// Polling makes progress: the first look at unfinished work says "not yet" and lets it finish.
bool poll(const Clock& clock) {
  if (anything_queued(clock)) {
    satisfy(clock);
    return false;
  }
  state().host.join(clock);
  return true;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return c10::Device(kType, static_cast<c10::DeviceIndex>(exchange_device(device.index())));
  }
  c10::Device getDevice() const override { return c10::Device(kType, static_cast<c10::DeviceIndex>(t_device)); }
  void setDevice(c10::Device device) const override { exchange_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < kDevices) t_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Device resolve(c10::Device device) const { return device.has_index() ? device : getDevice(); }
  c10::Stream make(c10::Device device, int id) const {
    check_device(device.index());
    return c10::Stream(c10::Stream::UNSAFE, device, id);
  }
  c10::Stream getStream(c10::Device device) const SIM_GUARD_NOEXCEPT override {
    device = resolve(device);
    check_device(device.index());
    return make(device, t_stream[device.index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return make(resolve(device), 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    device = resolve(device);
    check_device(device.index());
    Locked lock;
    int& next = state().next_in_pool[device.index()];
    return make(device, 1 + next++ % kPool);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const SIM_GUARD_NOEXCEPT override {
    stream_index(stream);  // checks
    int& slot = t_stream[stream.device_index()];
    return make(stream.device(), std::exchange(slot, static_cast<int>(stream.id())));
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    Locked lock;
    if (!*event) *event = new EventState();
    auto* e = static_cast<EventState*>(*event);
    StreamState& st = state().streams[stream_index(stream)];
    st.clock.join(state().host);
    e->recorded = true;
    e->clock = st.clock;
    e->when = std::chrono::steady_clock::now();
  }
  void block(void* event, const c10::Stream& stream) const override {
    auto* e = static_cast<EventState*>(event);
    if (!e || !e->recorded) return;
    Locked lock;
    state().streams[stream_index(stream)].clock.join(e->clock);
  }
  bool queryEvent(void* event) const override {
    auto* e = static_cast<EventState*>(event);
    if (!e || !e->recorded) return true;
    Locked lock;
    return poll(e->clock);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<EventState*>(event);
  }
  void synchronizeEvent(void* event) const override {
    auto* e = static_cast<EventState*>(event);
    if (!e || !e->recorded) return;
    Locked lock;
    ++state().count.event_syncs;
    host_waits_for(e->clock);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    auto *a = static_cast<EventState*>(first), *b = static_cast<EventState*>(second);
    TORCH_CHECK(a && b && a->recorded && b->recorded, "both events must be recorded before elapsed_time");
    return std::chrono::duration<double, std::milli>(b->when - a->when).count();
  }

  bool queryStream(const c10::Stream& stream) const override {
    Locked lock;
    return poll(state().streams[stream_index(stream)].clock);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Locked lock;
    ++state().count.stream_syncs;
    host_waits_for(state().streams[stream_index(stream)].clock);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    check_device(device);
    Locked lock;
    ++state().count.device_syncs;
    for (int i = 0; i < kPerDevice; ++i) host_waits_for(state().streams[device * kPerDevice + i].clock);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Locked lock;
    if (auto block = find_block(state().device_blocks, data.get(), 1)) block->recorded.set(stream_index(stream));
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace
}  // namespace sim
