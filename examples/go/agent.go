// One trajectory of an agent through a running mesh: each turn generates tokens and calls a tool, and the last answer is
// scored.
//
//	agent [--scheduler HOST:PORT] [--turns 2] [--max-new-tokens 32] [--prompt TOKEN_ID,TOKEN_ID,...]
//
// Prints one JSON object; what happens on the way goes to stderr. A lost engine costs no token: the step goes on where it
// stopped, on another engine. Which call comes when, and what to do on which error: docs/clients.md.
package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	mathrand "math/rand"
	"os"
	"strconv"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	common "treadle-agent/gen/treadle/common/v1"
	engine "treadle-agent/gen/treadle/engine/v1"
	scheduler "treadle-agent/gen/treadle/scheduler/v1"
	tools "treadle-agent/gen/treadle/tools/v1"
)

const (
	controlTime  = time.Minute      // a logical call with its repeats: outlasts a restart of the scheduler
	scheduleTime = 5 * time.Minute  // a step waits this long for an engine
	streamTime   = 24 * time.Hour   // the stream of a step, with its wait in the queue of the engine
	toolTime     = 10 * time.Minute // a tool's own limit is shorter
	// So many engines lost in a row without one new token, and the step fails: its prompt may be what brings them down.
	maxFruitlessLosses = 5
)

// ---- Calls: deadlines, repeats, errors

// connect opens the connection to a service at host:port, with the certificate in TREADLE_TLS_FOLDER where that is set.
// Pings notice a machine that vanished without a word.
func connect(address, service string) (*grpc.ClientConn, error) {
	security := grpc.WithTransportCredentials(insecure.NewCredentials())
	if folder := os.Getenv("TREADLE_TLS_FOLDER"); folder != "" {
		own, err := tls.LoadX509KeyPair(folder+"/tls.crt", folder+"/tls.key")
		if err != nil {
			return nil, err
		}
		authorities, err := os.ReadFile(folder + "/ca.crt")
		if err != nil {
			return nil, err
		}
		trusted := x509.NewCertPool()
		trusted.AppendCertsFromPEM(authorities)
		security = grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{
			Certificates: []tls.Certificate{own},
			RootCAs:      trusted,
			ServerName:   service + ".treadle", // a service is known by this name, wherever it listens
		}))
	}
	return grpc.NewClient(address, security,
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 5 * time.Second}))
}

// failure is what a failed call says to a program.
type failure struct {
	reason     string        // of the service; empty where the connection broke
	full       bool          // a queue or quota, which says when to come again
	repeatable bool          // the same request may be sent again
	retryAfter time.Duration // at least
}

func read(err error) failure {
	said, ok := status.FromError(err)
	if !ok { // not of a call
		return failure{}
	}
	var found failure
	hasDelay := false
	for _, detail := range said.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			found.reason = detail.GetReason()
		case *errdetails.RetryInfo:
			found.retryAfter, hasDelay = detail.GetRetryDelay().AsDuration(), true
		}
	}
	found.full = said.Code() == codes.ResourceExhausted && hasDelay
	found.repeatable = found.full || said.Code() == codes.Unavailable
	if found.reason == "" { // Every error of a service has a reason. One without comes from the connection.
		switch said.Code() {
		case codes.Canceled, codes.Unknown, codes.Aborted, codes.Internal:
			found.repeatable = true
		}
	}
	return found
}

// backOff waits before the next attempt: 50 ms, then twice as long each time up to 1 s, with jitter, and as the server asks.
func backOff(attempt int, atLeast time.Duration) {
	longest := time.Second
	if attempt < 5 {
		longest = 50 * time.Millisecond << attempt
	}
	delay := time.Duration(float64(longest) * (0.5 + mathrand.Float64()/2))
	if delay < atLeast {
		delay = atLeast
	}
	time.Sleep(delay)
}

// call makes a unary call. A repeat is the same request with the same request_id, so that nothing is done twice.
func call[Q, A any](
	method func(context.Context, Q, ...grpc.CallOption) (A, error), request Q, limit time.Duration,
) (A, error) {
	deadline := time.Now().Add(limit)
	for attempt := 0; ; attempt++ {
		ctx, cancel := context.WithDeadline(context.Background(), deadline)
		answer, err := method(ctx, request)
		cancel()
		if err == nil {
			return answer, nil
		}
		failed := read(err)
		if failed.reason == "STEP_HELD" { // the scheduler works, and the step waits for room
			deadline = time.Now().Add(limit)
		}
		if !failed.repeatable || time.Now().Add(failed.retryAfter).After(deadline) {
			return answer, err
		}
		backOff(attempt, failed.retryAfter)
	}
}

// newID returns a fresh id for one logical call.
func newID() string {
	var id [16]byte
	if _, err := rand.Read(id[:]); err != nil {
		panic(err) // no source of random numbers
	}
	return hex.EncodeToString(id[:])
}

// mesh holds the clients of one mesh.
type mesh struct {
	scheduler scheduler.SchedulerServiceClient
	tools     tools.ToolsServiceClient
	rewards   tools.RewardsServiceClient
	engines   map[string]*grpc.ClientConn // by address
}

// connectMesh asks the scheduler at address where the other services are.
func connectMesh(address string) (*mesh, error) {
	connection, err := connect(address, "scheduler")
	if err != nil {
		return nil, err
	}
	m := &mesh{scheduler: scheduler.NewSchedulerServiceClient(connection), engines: map[string]*grpc.ClientConn{}}
	directory, err := call(m.scheduler.GetDirectory, &scheduler.GetDirectoryRequest{}, controlTime)
	if err != nil {
		return nil, err
	}
	if directory.GetToolsAddress() == "" {
		return nil, errors.New("the mesh runs no tools service")
	}
	if connection, err = connect(directory.GetToolsAddress(), "tools"); err != nil {
		return nil, err
	}
	m.tools, m.rewards = tools.NewToolsServiceClient(connection), tools.NewRewardsServiceClient(connection)
	return m, nil
}

func (m *mesh) engine(address string) (engine.EngineServiceClient, error) {
	if m.engines[address] == nil {
		connection, err := connect(address, "sidecar")
		if err != nil {
			return nil, err
		}
		m.engines[address] = connection
	}
	return engine.NewEngineServiceClient(m.engines[address]), nil
}

// underJob runs work under a job. Its lease is renewed; should this process die, the scheduler closes what it has open.
func (m *mesh) underJob(work func(jobID string) error) (err error) {
	job, err := call(m.scheduler.OpenJob, &scheduler.OpenJobRequest{RequestId: newID()}, controlTime)
	if err != nil {
		return err
	}
	done := make(chan struct{})
	go func() {
		ticker := time.NewTicker(job.GetLeaseTtl().AsDuration() / 3)
		defer ticker.Stop()
		for {
			select {
			case <-done:
				return
			case <-ticker.C:
				renewal := &scheduler.RenewJobRequest{JobId: job.GetJobId()}
				if _, err := call(m.scheduler.RenewJob, renewal, controlTime); err != nil {
					fmt.Fprintln(os.Stderr, "the lease:", err)
				}
			}
		}
	}()
	defer func() {
		close(done)
		closing := &scheduler.CloseJobRequest{RequestId: newID(), JobId: job.GetJobId()}
		if _, closeErr := call(m.scheduler.CloseJob, closing, controlTime); err == nil {
			err = closeErr
		}
	}()
	return work(job.GetJobId())
}

// ---- One step: a ticket, and the stream that it opens

// step is what one turn brought.
type step struct {
	EngineIDs    []string  `json:"engine_ids"`
	Starts       int       `json:"starts"` // admissions by an engine: more than one after a loss or a preemption
	TokenIDs     []int32   `json:"token_ids"`
	Logprobs     []float32 `json:"logprobs"` // natural log, one a token
	FinishReason string    `json:"finish_reason"`
	QueueS       float64   `json:"queue_s"` // these three on the last engine
	PrefillS     float64   `json:"prefill_s"`
	DecodeS      float64   `json:"decode_s"`
	ToolOutput   string    `json:"tool_output"`
}

// generate generates one step, on as many engines as it takes. tool is what the tool before it took.
func (m *mesh) generate(
	trajectoryID string, turn int32, prompt []int32, maxNewTokens int32, tool time.Duration,
) (*step, error) {
	made := &step{}
	replaces := ""   // the ticket of the stream that was lost
	refused := false // its engine did not take the step: nothing is wrong with the engine
	fruitless := 0
	for attempt := 0; ; attempt++ {
		known, starts := len(made.TokenIDs), made.Starts
		scheduled, err := call(m.scheduler.ScheduleStep, &scheduler.ScheduleStepRequest{
			RequestId:        newID(),
			TrajectoryId:     trajectoryID,
			Turn:             turn,
			ContextTokens:    int32(len(prompt)),
			MaxNewTokens:     maxNewTokens,
			ReplacesTicketId: replaces,
			ResumedTokens:    int32(known),
			EngineRefused:    refused,
			ToolTime:         durationpb.New(tool),
		}, scheduleTime)
		if err != nil {
			return nil, err
		}
		ticket := scheduled.GetTicket()
		made.EngineIDs = append(made.EngineIDs, ticket.GetEngineId())
		if err = m.stream(ticket, prompt, maxNewTokens, made); err == nil {
			return made, nil
		}
		failed := read(err)
		stale := failed.reason == "TICKET_EXPIRED" || failed.reason == "TICKET_WRONG_ENGINE"
		if len(made.TokenIDs) > known {
			attempt, fruitless = 0, 0
		} else if made.Starts > starts {
			fruitless++
		}
		if !(failed.repeatable || stale) || fruitless == maxFruitlessLosses {
			return nil, err
		}
		lost := "turn %d: %s was lost after %d tokens: %v\n"
		fmt.Fprintf(os.Stderr, lost, turn, ticket.GetEngineId(), len(made.TokenIDs), err)
		if len(made.TokenIDs) == int(maxNewTokens) { // all tokens came, and only the last message is missing
			made.FinishReason = "LENGTH"
			return made, nil
		}
		replaces, refused = ticket.GetTicketId(), failed.full || stale
		if !failed.full { // a lost engine asks for time, but the next ticket is for another
			failed.retryAfter = 0
		}
		backOff(attempt, failed.retryAfter)
	}
}

// stream adds to made what one stream brings.
func (m *mesh) stream(ticket *common.Ticket, prompt []int32, maxNewTokens int32, made *step) error {
	client, err := m.engine(ticket.GetEngineAddress())
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), streamTime)
	defer cancel() // left early, the engine must not go on; after the end it changes nothing
	events, err := client.Generate(ctx, &engine.GenerateRequest{
		Ticket:        ticket,
		Prompt:        packIDs(prompt),
		Sampling:      &common.SamplingParams{MaxNewTokens: maxNewTokens, Temperature: proto.Float64(0)},
		ResumedOutput: packIDs(made.TokenIDs), // what lost engines have sent
	})
	if err != nil {
		return err
	}
	for {
		response, err := events.Recv()
		if err == io.EOF {
			if made.FinishReason == "" {
				return errors.New("the stream ended without StepFinished")
			}
			return nil
		}
		if err != nil {
			return err
		}
		switch event := response.GetEvent().(type) {
		case *engine.GenerateResponse_Started:
			made.Starts++
		case *engine.GenerateResponse_Tokens:
			if int(event.Tokens.GetOffset()) != len(made.TokenIDs) {
				return fmt.Errorf("offset %d after %d tokens", event.Tokens.GetOffset(), len(made.TokenIDs))
			}
			ids, err := unpack[int32](event.Tokens.GetTokenIds().GetInt32Le())
			if err != nil {
				return err
			}
			logprobs, err := unpack[float32](event.Tokens.GetLogprobs().GetFloat32Le())
			if err != nil {
				return err
			}
			made.TokenIDs, made.Logprobs = append(made.TokenIDs, ids...), append(made.Logprobs, logprobs...)
		case *engine.GenerateResponse_Finished:
			if int(event.Finished.GetOutputTokens()) != len(made.TokenIDs) {
				return fmt.Errorf("%d of %d tokens", len(made.TokenIDs), event.Finished.GetOutputTokens())
			}
			timing := event.Finished.GetTiming()
			made.FinishReason = strings.TrimPrefix(event.Finished.GetReason().String(), "FINISH_REASON_")
			made.QueueS = timing.GetQueue().AsDuration().Seconds()
			made.PrefillS = timing.GetPrefill().AsDuration().Seconds()
			made.DecodeS = timing.GetDecode().AsDuration().Seconds()
		}
	}
}

// Token ids travel as packed little-endian int32, logprobs as float32.
func packIDs(ids []int32) *common.TokenIds {
	var packed bytes.Buffer
	if err := binary.Write(&packed, binary.LittleEndian, ids); err != nil {
		panic(err) // a buffer takes all
	}
	return &common.TokenIds{Int32Le: packed.Bytes()}
}

func unpack[T int32 | float32](packed []byte) ([]T, error) {
	if len(packed)%4 != 0 {
		return nil, fmt.Errorf("%d bytes are not a whole number of 4-byte items", len(packed))
	}
	items := make([]T, len(packed)/4)
	return items, binary.Read(bytes.NewReader(packed), binary.LittleEndian, items)
}

// ---- The agent

type trajectory struct {
	TrajectoryID string  `json:"trajectory_id"`
	Prompt       []int32 `json:"prompt"`
	Steps        []*step `json:"steps"`
	Score        float64 `json:"score"`
}

// runTrajectory opens a trajectory, plays its turns, requests its reward and closes it, as failed where anything fails.
// Returns it with the id of the reward.
func (m *mesh) runTrajectory(
	jobID string, prompt []int32, turns int, maxNewTokens int32,
) (made *trajectory, rewardID string, err error) {
	opened, err := call(m.scheduler.OpenTrajectory, &scheduler.OpenTrajectoryRequest{
		RequestId:    newID(),
		JobId:        jobID,
		PromptId:     "go-example",
		PromptTokens: int32(len(prompt)),
	}, controlTime)
	if err != nil {
		return nil, "", err
	}
	id := opened.GetTrajectory().GetTrajectoryId()
	defer func() {
		outcome := scheduler.Outcome_OUTCOME_FINISHED
		if err != nil {
			outcome = scheduler.Outcome_OUTCOME_FAILED
		}
		closing := &scheduler.CloseTrajectoryRequest{RequestId: newID(), TrajectoryId: id, Outcome: outcome}
		if _, closeErr := call(m.scheduler.CloseTrajectory, closing, controlTime); err == nil {
			err = closeErr
		}
	}()
	made = &trajectory{TrajectoryID: id, Prompt: prompt}
	context := append([]int32{}, prompt...)
	var last *step
	var tool time.Duration
	for turn := 0; turn < turns; turn++ {
		if last, err = m.generate(id, int32(turn), context, maxNewTokens, tool); err != nil {
			return nil, "", err
		}
		began := time.Now()
		if last.ToolOutput, err = m.addUp(id, last.TokenIDs); err != nil {
			return nil, "", err
		}
		tool = time.Since(began)
		made.Steps = append(made.Steps, last)
		context = append(context, last.TokenIDs...)
		// A real agent renders the tool's output with its tokenizer; here each byte is a token id.
		for _, each := range []byte(last.ToolOutput) {
			context = append(context, int32(each))
		}
	}
	rewardID, err = m.score(id, last)
	return made, rewardID, err
}

// addUp calls the tool: Python adds up the token ids. A tool that fails is an answer, which a real agent reads.
func (m *mesh) addUp(trajectoryID string, ids []int32) (string, error) {
	words := make([]string, len(ids))
	for i, id := range ids {
		words[i] = strconv.Itoa(int(id))
	}
	answer, err := call(m.tools.Invoke, &tools.InvokeRequest{
		RequestId:     newID(),
		TrajectoryId:  trajectoryID,
		Tool:          "python",
		ArgumentsJson: toJSON(map[string]string{"code": "print(" + strings.Join(words, " + ") + ")"}),
	}, toolTime)
	if err != nil {
		return "", err
	}
	if answer.GetResult().GetStatus() != tools.ResultStatus_RESULT_STATUS_OK {
		return answer.GetResult().GetError(), nil
	}
	return answer.GetResult().GetOutput(), nil
}

// score requests the reward of the last answer. Returns its id at once: the trajectory can be closed while it is computed.
func (m *mesh) score(trajectoryID string, last *step) (string, error) {
	var expected int64
	for _, id := range last.TokenIDs {
		expected += int64(id)
	}
	arguments := map[string]string{"answer": strings.TrimSpace(last.ToolOutput), "expected": fmt.Sprint(expected)}
	answer, err := call(m.rewards.ScoreTrajectory, &tools.ScoreTrajectoryRequest{
		RequestId:     newID(),
		TrajectoryId:  trajectoryID,
		Reward:        "exact_match",
		ArgumentsJson: toJSON(arguments),
	}, controlTime)
	return answer.GetReward().GetRewardId(), err
}

// scoreOf returns the score, once it is there. For many at once there is WatchRewards.
func (m *mesh) scoreOf(rewardID string) (float64, error) {
	for attempt := 0; ; attempt++ {
		answer, err := call(m.rewards.GetReward, &tools.GetRewardRequest{RewardId: rewardID}, controlTime)
		if err != nil {
			return 0, err
		}
		reward := answer.GetReward()
		if reward.GetState() == tools.RewardState_REWARD_STATE_DONE {
			return reward.GetScore(), nil
		}
		if reward.GetState() > tools.RewardState_REWARD_STATE_DONE {
			return 0, fmt.Errorf("no score: %s %s", reward.GetState(), reward.GetError())
		}
		backOff(attempt, 0)
	}
}

func toJSON(value any) string {
	text, err := json.Marshal(value)
	if err != nil {
		panic(err) // maps, numbers and strings all have a form in JSON
	}
	return string(text)
}

func run() error {
	address := flag.String("scheduler", "localhost:7401", "host:port of the scheduler")
	turns := flag.Int("turns", 2, "turns of the trajectory")
	maxNewTokens := flag.Int("max-new-tokens", 32, "tokens of each turn")
	words := flag.String("prompt", "504,2365,354,314,253", "token ids of the prompt, with commas between")
	flag.Parse()
	var prompt []int32
	for _, word := range strings.Split(*words, ",") {
		id, err := strconv.ParseInt(word, 10, 32)
		if err != nil {
			return err
		}
		prompt = append(prompt, int32(id))
	}
	m, err := connectMesh(*address)
	if err != nil {
		return err
	}
	var made *trajectory
	var rewardID string
	err = m.underJob(func(jobID string) (err error) {
		made, rewardID, err = m.runTrajectory(jobID, prompt, *turns, int32(*maxNewTokens))
		return err
	})
	if err != nil {
		return err
	}
	if made.Score, err = m.scoreOf(rewardID); err != nil {
		return err
	}
	fmt.Println(toJSON(made))
	return nil
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "agent:", err)
		os.Exit(1)
	}
}
