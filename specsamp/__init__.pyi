"""The public names of the package, and the modules that have them: for editors, and for
`specsamp.__getattr__`.
"""

from specsamp.checkpoints.trained_pair import load_pair as load_pair
from specsamp.compilation_cache import use_compilation_cache as use_compilation_cache
from specsamp.decoding.adaptive import (
    Adaptive as Adaptive,
    Confidence as Confidence,
    Entropy as Entropy,
    Stop as Stop,
)
from specsamp.decoding.conversation import Conversation as Conversation
from specsamp.decoding.drafter import Drafter as Drafter, DrafterHooks as DrafterHooks
from specsamp.decoding.drafters import (
    BlockDrafter as BlockDrafter,
    BeamDrafter as BeamDrafter,
    BlockTree as BlockTree,
    ChoosingDrafter as ChoosingDrafter,
    EarlyExitDrafter as EarlyExitDrafter,
    EarlyExitTree as EarlyExitTree,
    FeatureDrafter as FeatureDrafter,
    FeatureTree as FeatureTree,
    ModelDrafter as ModelDrafter,
    ModelTree as ModelTree,
    NgramDrafter as NgramDrafter,
    NgramTree as NgramTree,
    ModuleDrafter as ModuleDrafter,
    NoDrafter as NoDrafter,
    ParallelDrafter as ParallelDrafter,
    TranslatingDrafter as TranslatingDrafter,
    VotingDrafter as VotingDrafter,
    WindowDrafter as WindowDrafter,
)
from specsamp.decoding.generate import generate as generate, stream as stream
from specsamp.decoding.loop import Loop as Loop
from specsamp.decoding.method import Method as Method
from specsamp.decoding.pair import Pair as Pair
from specsamp.decoding.results import Chunk as Chunk, Completion as Completion, RowStats as RowStats
from specsamp.decoding.trees import Growth as Growth, TreeShape as TreeShape
from specsamp.models.config import TransformerConfig as TransformerConfig
from specsamp.models.interface import LanguageModel as LanguageModel, Output as Output
from specsamp.models.transformer import TransformerLM as TransformerLM
from specsamp.sampling.coupled import CoupledRule as CoupledRule
from specsamp.sampling.lossy import (
    EARS as EARS,
    Bounded as Bounded,
    JointThreshold as JointThreshold,
    Lenience as Lenience,
    Typical as Typical,
)
from specsamp.sampling.penalties import ban as ban, bias as bias, penalties as penalties
from specsamp.sampling.rejection import BlockRule as BlockRule, TokenRule as TokenRule
from specsamp.sampling.rules import Draft as Draft, Rule as Rule, Verdict as Verdict
from specsamp.sampling.tree_rules import (
    KSeqRule as KSeqRule,
    RecursiveRule as RecursiveRule,
    TraversalRule as TraversalRule,
)
from specsamp.sampling.warp import (
    chain as chain,
    greedy as greedy,
    min_p as min_p,
    temperature as temperature,
    top_k as top_k,
    top_p as top_p,
)
from specsamp.serving.generate_many import generate_many as generate_many
from specsamp.serving.orders import FirstCome as FirstCome, ShortestFirst as ShortestFirst
from specsamp.serving.sampling_request import SamplingRequest as SamplingRequest
from specsamp.serving.completion_log import CompletionLog as CompletionLog

__version__: str
