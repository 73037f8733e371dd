"""On which stream a step becomes a CUDA graph: two devices of a process, with stand-ins for `torch.cuda`."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from pod.engine import decode_engine as module
from pod.engine.decode_engine import StaticEngine


class FakeStream:
    def __init__(self, device=None):
        self.device = torch.cuda.current_device() if device is None else device

    def wait_stream(self, other):
        assert other.device == self.device, "a stream waits for one of another device"


class FakeCuda:
    """The current device, the current stream of each device, and how graphs were captured."""

    def __init__(self):
        self.device, self.streams, self.captured = 0, {}, []

    def current_stream(self):
        return self.streams.setdefault(self.device, FakeStream(self.device))

    @contextmanager
    def use_device(self, device):
        before, self.device = self.device, torch.device(device).index
        yield
        self.device = before

    @contextmanager
    def use_stream(self, stream):
        """As `torch.cuda.stream`: it also makes the stream's device the current one."""
        device, self.device = self.device, stream.device
        before, self.streams[stream.device] = self.current_stream(), stream
        yield
        self.streams[stream.device], self.device = before, device

    def begin_capture(self, capture_error_mode, **options):
        self.captured.append((self.current_stream(), capture_error_mode))


@pytest.fixture
def cuda(monkeypatch):
    """The real `torch.cuda.graph` over these stand-ins."""
    fake = FakeCuda()
    graph = SimpleNamespace(capture_begin=fake.begin_capture, capture_end=lambda: None, replay=lambda: None)
    stand_ins = {
        "Stream": FakeStream,
        "CUDAGraph": lambda: graph,
        "current_device": lambda: fake.device,
        "current_stream": fake.current_stream,
        "device": fake.use_device,
        "stream": fake.use_stream,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", None)
    module._capture_stream.cache_clear()
    yield fake
    module._capture_stream.cache_clear()


def record_step(cuda, device):
    """Prepare a step of an engine whose cache is on ``device``; the streams on which it ran."""
    engine, streams = StaticEngine.__new__(StaticEngine), []
    engine.graphs = 0
    token = SimpleNamespace(device=torch.device("cuda", device))
    engine._bound = SimpleNamespace(token=token, can_be_recorded=lambda: True)

    def run():
        assert module._ONE_CAPTURE.locked(), "another thread could be recorded too"
        streams.append(cuda.current_stream())

    engine._prepare(run, restart=lambda: None)()
    assert engine.graphs == 1 and not module._ONE_CAPTURE.locked()
    return streams


def test_each_device_records_on_a_stream_of_its_own(cuda):
    """The first engine of a process is on device 0; what it leaves must not serve the second one."""
    defaults = {}
    for device in (0, 1):
        with cuda.use_device(torch.device("cuda", device)):
            defaults[device] = cuda.current_stream()
    found = {}
    for number, device in enumerate((0, 1, 0, 1)):
        streams = record_step(cuda, device)
        assert len(streams) == module._WARM_UPS + 1
        assert {stream.device for stream in streams} == {device}
        assert len(set(streams)) == 1, "a library gets its workspace before the capture"
        assert cuda.captured[number] == (streams[-1], "thread_local")
        assert streams[-1] is not defaults[device]
        assert found.setdefault(device, streams[-1]) is streams[-1]
    assert cuda.device == 0 and cuda.current_stream() is defaults[0]
