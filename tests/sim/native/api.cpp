// What Python sees: plain functions over integers and strings, so that no binding library is compiled.
#include "sim.h"

namespace sim {
namespace {

void check(int64_t device) { TORCH_CHECK(device >= 0 && device < kDevices, "invalid device ordinal npu:", device); }

c10::Dict<std::string, int64_t> counters() {
  Locked lock;
  const Counters& c = state().count;
  c10::Dict<std::string, int64_t> d;
  int64_t allocations = 0;
  for (int i = 0; i < kDevices; ++i) {
    std::string index = std::to_string(i);
    allocations += c.allocations[i];
    d.insert("allocations." + index, c.allocations[i]);
    d.insert("live_bytes." + index, c.live[i]);
    d.insert("peak_bytes." + index, c.peak[i]);
  }
  d.insert("allocations", allocations);
  d.insert("kernels", c.kernels);
  d.insert("h2d", c.h2d);
  d.insert("h2d_bytes", c.h2d_bytes);
  d.insert("h2d_pinned", c.h2d_pinned);
  d.insert("h2d_pageable", c.h2d_pageable);
  d.insert("d2h", c.d2h);
  d.insert("d2h_bytes", c.d2h_bytes);
  d.insert("d2h_pinned", c.d2h_pinned);
  d.insert("d2h_pageable", c.d2h_pageable);
  d.insert("d2d", c.d2d);
  d.insert("d2d_bytes", c.d2d_bytes);
  d.insert("queued_copies", c.queued);
  d.insert("stream_syncs", c.stream_syncs);
  d.insert("device_syncs", c.device_syncs);
  d.insert("event_syncs", c.event_syncs);
  d.insert("implicit_syncs", c.implicit_syncs);
  d.insert("host_syncs", c.stream_syncs + c.device_syncs + c.event_syncs + c.implicit_syncs);
  d.insert("pinned_bytes", c.pinned);
  d.insert("pinned_peak_bytes", c.pinned_peak);
  d.insert("pinned_reserved_bytes", c.pinned_reserved);
  d.insert("pinned_reserved_peak_bytes", c.pinned_reserved_peak);
  d.insert("pinned_allocations", c.pinned_allocations);
  d.insert("host_registrations", c.host_registrations);
  return d;
}

// Totals start again; what lives now stays counted, and the peaks fall to it.
void reset_counters() {
  Locked lock;
  Counters& c = state().count;
  Counters fresh;
  fresh.live = fresh.peak = c.live;
  fresh.pinned = fresh.pinned_peak = c.pinned;
  fresh.pinned_reserved = fresh.pinned_reserved_peak = c.pinned_reserved;
  c = fresh;
}

std::vector<std::string> hazards() {
  Locked lock;
  return state().hazards;
}

void reset_hazards() {
  Locked lock;
  state().hazards.clear();
}

// The whole machine comes to rest: for the start of a test.
void drain() {
  Locked lock;
  for (auto& stream : state().streams) host_waits_for(stream.clock);
}

int64_t pending() {
  Locked lock;
  size_t n = 0;
  for (auto& stream : state().streams) n += stream.queue.size();
  return static_cast<int64_t>(n);
}

int64_t get_device() { return current_device(); }
int64_t set_device(int64_t device) { return exchange_device(static_cast<int>(device)); }

int64_t memory_allocated(int64_t device) {
  check(device);
  return state().count.live[device];
}

int64_t max_memory_allocated(int64_t device) {
  check(device);
  return state().count.peak[device];
}

void reset_peak(int64_t device) {
  check(device);
  state().count.peak[device] = state().count.live[device];
}

int64_t memory_limit(int64_t device) {
  check(device);
  return state().memory_limit[device];
}

void set_memory_limit(int64_t device, int64_t limit) {
  check(device);
  state().memory_limit[device] = limit;
}

void set_pin_limit(int64_t limit) { state().pin_limit = limit; }

TORCH_LIBRARY(sim_npu, m) {
  m.def("counters() -> Dict(str, int)", &counters);
  m.def("reset_counters() -> ()", &reset_counters);
  m.def("hazards() -> str[]", &hazards);
  m.def("reset_hazards() -> ()", &reset_hazards);
  m.def("drain() -> ()", &drain);
  m.def("pending() -> int", &pending);
  m.def("get_device() -> int", &get_device);
  m.def("set_device(int device) -> int", &set_device);
  m.def("memory_allocated(int device) -> int", &memory_allocated);
  m.def("max_memory_allocated(int device) -> int", &max_memory_allocated);
  m.def("reset_peak(int device) -> ()", &reset_peak);
  m.def("memory_limit(int device) -> int", &memory_limit);
  m.def("set_memory_limit(int device, int limit) -> ()", &set_memory_limit);
  m.def("set_pin_limit(int limit) -> ()", &set_pin_limit);
  m.def("host_register(int ptr, int nbytes) -> ()", &host_register);
  m.def("host_unregister(int ptr) -> ()", &host_unregister);
}

}  // namespace
}  // namespace sim
