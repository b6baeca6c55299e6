"""The compiler is imported by who compiles, and only then; in a process of its own, where nobody has done so yet."""

import subprocess
import sys

IMPORTS = """
import os, sys, tempfile, traceback, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
"""
TRAIN = """
from shoal.launch.deferred import defer_dynamo

defer_dynamo()
dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1)
model = torch.nn.Linear(4, 4)
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
schedule = torch.optim.lr_scheduler.LinearLR(optimizer)

def steps():
    optimizer.zero_grad()
    wrapped(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    schedule.step()
    optimizer.load_state_dict(optimizer.state_dict())

def parts():
    return len([name for name in sys.modules if name.startswith("torch._dynamo")])

steps()
assert parts() == 1, parts()
"""

USES = {
    "compile": 'f = torch.compile(lambda x: x + 1, backend="eager"); assert f(torch.ones(2)).tolist() == [2, 2]',
    "a part": "import torch._dynamo.config as config; assert config.recompile_limit > 0",
    "a name": "from torch._dynamo import reset; reset()",
    "an attribute": "assert torch._dynamo.config.recompile_limit > 0",
}


REST = "assert parts() > 50 and torch._dynamo is sys.modules['torch._dynamo']\nsteps()\n"
FORKS = """
for name, text in {texts!r}.items():
    if not os.fork():
        try:
            exec(text)
            print("well:", name, flush=True)
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.wait()
"""


def test_training_does_not_import_the_compiler_and_any_use_of_it_does():
    texts = {name: f"{TRAIN}\n{use}\n{REST}" for name, use in USES.items()}
    code = IMPORTS + FORKS.format(texts=texts)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines() == [f"well: {name}" for name in USES], done.stderr
