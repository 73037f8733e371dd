// What autograd asks of a device: how many there are, which one is current, and a stream of each.
//
// PyTorch's device guard for devices made of Python knows one device only, so that a backward pass on a
// second one fails, and it ends the process where an error leaves a backward pass. Here nothing runs at the
// same time: each device has one stream, and every event has happened already.
// Compiled with -DNUM_DEVICES=….

#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

thread_local DeviceIndex current = 0;

struct SimulatedGuard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override {
    return DeviceType::PrivateUse1;
  }

  DeviceIndex deviceCount() const noexcept override {
    return NUM_DEVICES;
  }

  Device getDevice() const override {
    return Device(type(), current);
  }

  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) {
      current = device.index();
    }
  }

  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < NUM_DEVICES, "there is no ", device, ", only ", NUM_DEVICES, " devices");
    uncheckedSetDevice(device);
  }

  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }

  Stream getStream(Device device) const override {
    return Stream(Stream::DEFAULT, device.has_index() ? device : getDevice());
  }

  Stream exchangeStream(Stream stream) const override {
    return getStream(stream.device());
  }

  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}

  void block(void*, const Stream&) const override {}

  bool queryEvent(void*) const override {
    return true;
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, SimulatedGuard);

} // namespace
